"""A sampler in a process of its own keeps the sampler's contract, and the other end of its socket may be anything."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sampling_kit import ask, build, make_local, plain_logprobs, prompt, run, seeded, session, shared
from transformers import LlamaForCausalLM

from envgrad.errors import ConfigurationError, SamplerDied, SamplerFailure, WeightTransferError
from envgrad.rollout.activity import Activity
from envgrad.sampling import process_link
from envgrad.sampling.process import ProcessSampler
from envgrad.sampling.process_frames import Frame
from envgrad.sampling.process_weights import write_weights
from envgrad.sampling.sampler import Completion, SamplingParams
from helpers.threads import sampler_threads
from helpers.tokenizers import CHATML, bpe_tokenizer

TOKENIZER = bpe_tokenizer(CHATML)


@pytest.fixture(scope="module")
def sampler() -> Iterator[ProcessSampler]:
    """One process for the tests that leave it as it is."""
    sampler = ProcessSampler(
        shared("llama"), max_sessions=4, max_context=128, deterministic=True, tokenizer=TOKENIZER, threads=1,
        activity=Activity(),
    )  # fmt: skip
    yield sampler
    sampler.close()


def listed(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_answers_are_those_of_the_local_sampler_bit_for_bit(sampler: ProcessSampler) -> None:
    """Sessions in waves, with turns: the events arrive in their order, so the schedule is the same too."""

    async def play(one: object) -> list[Completion]:
        async def episode(task: int, sibling: int) -> list[Completion]:
            at, row, answers = session(task, sibling), prompt(20, task), []
            for turn in range(3):
                params = seeded(5 + sibling, seed=100 * task + 10 * sibling + turn, temperature=0.7)
                answers.append(await one.sample(row, params, at))  # type: ignore[attr-defined]
                row = [*row, *answers[-1].token_ids, 7]
            one.end(at)  # type: ignore[attr-defined]
            return answers

        places = [(task, sibling) for task in range(2) for sibling in range(3)]
        for task, sibling in places:
            one.begin(session(task, sibling))  # type: ignore[attr-defined]
        return [answer for episode in await asyncio.gather(*(episode(*at) for at in places)) for answer in episode]

    local = make_local(max_sessions=4, deterministic=True)
    steps = sampler.stats.steps
    want, got = run(play(local)), run(play(sampler))
    assert got == want and sampler.served_by == "LocalSampler"
    assert sampler.stats.steps - steps == local.stats.steps
    local.close()


def test_stop_strings_are_found_there(sampler: ProcessSampler) -> None:
    params = seeded(40, seed=3)
    (free,) = run(ask(sampler, [(session(0), prompt(9), params)]))
    text = TOKENIZER.decode(list(free.token_ids))
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (cut,) = run(ask(sampler, [(session(0), prompt(9), seeded(40, seed=3, stop_strings=(stop,)))]))
    assert cut.stop_reason == "stop" and cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert stop in TOKENIZER.decode(list(cut.token_ids)) and stop not in TOKENIZER.decode(list(cut.token_ids[:-1]))


def test_steps_are_told_on_the_clock_of_this_process(sampler: ProcessSampler) -> None:
    activity = sampler._activity
    assert activity is not None
    activity.take()
    began = activity.clock()
    run(ask(sampler, [(session(0), prompt(9), seeded(6))]))
    spans = activity.take()
    assert sum(span.tokens for span in spans if span.kind == "prefill") == 9
    assert sum(span.tokens for span in spans if span.kind == "decode") == 5
    assert all(began <= span.start <= span.end <= activity.clock() for span in spans)


def test_requests_that_cannot_be_answered_are_refused_as_by_the_local_one(sampler: ProcessSampler) -> None:
    with pytest.raises(SamplerFailure, match="token id 61"):
        run(ask(sampler, [(session(0), [61], seeded())]))
    with pytest.raises(SamplerFailure, match="no room"):
        run(ask(sampler, [(session(0), [1] * 128, seeded())]))
    with pytest.raises(ConfigurationError, match="has not begun"):
        run(sampler.sample([1], seeded(), session(5)))
    sampler.begin(session(5))
    with pytest.raises(ConfigurationError, match="has begun already"):
        sampler.begin(session(5))
    sampler.end(session(5))
    with pytest.raises(ConfigurationError, match="pass them by name"):
        sampler.update_weights(9, None)


def test_an_error_of_one_request_there_is_that_requests_alone(sampler: ProcessSampler) -> None:
    """The other side checks too: it is asked here for what this side would have refused."""

    async def work() -> None:
        sampler.begin(session(0))
        sampler._vocabulary, kept = 10**6, sampler._vocabulary
        with pytest.raises(SamplerFailure, match="token id 99"):
            await sampler.sample([99], seeded(), session(0))
        sampler._vocabulary = kept
        assert len((await sampler.sample([9], seeded(2), session(0))).token_ids) == 2
        sampler.end(session(0))

    run(work())


def test_a_cancelled_request_makes_room_and_its_session_may_ask_again(sampler: ProcessSampler) -> None:
    async def work() -> Completion:
        sampler.begin(session(0))
        slow = asyncio.create_task(sampler.sample([1], seeded(120), session(0)))
        await asyncio.sleep(0.002)
        while not slow.cancel():  # it was answered meanwhile
            slow = asyncio.create_task(sampler.sample([1], seeded(120), session(0)))
            await asyncio.sleep(0.002)
        with pytest.raises(asyncio.CancelledError):
            await slow
        again = await sampler.sample([1, 2], seeded(3), session(0))
        sampler.end(session(0))
        return again

    answer = run(work())
    want = plain_logprobs(shared("llama"), [1, 2, *answer.token_ids], 2)
    assert answer.logprobs == pytest.approx(want, abs=1e-4)


def test_published_weights_are_served_and_bad_ones_leave_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole life of one process: weights, torn and corrupt ones, one that diverged, and the end."""
    model = build("llama")
    before, activity = sampler_threads(), Activity()
    sampler = ProcessSampler(
        model, max_sessions=4, max_context=160, threads=1, version=3,
        weights={name: tensor * 0.9 for name, tensor in model.state_dict().items()}, activity=activity,
    )  # fmt: skip
    scaled = build("llama")

    def check(version: int, factor: float) -> None:
        with torch.no_grad():
            for name, tensor in scaled.state_dict().items():
                tensor.copy_(model.state_dict()[name] * factor)
        (answer,) = run(ask(sampler, [(session(0), prompt(12), seeded(6))]))
        want = plain_logprobs(scaled, [*prompt(12), *answer.token_ids], 12)
        assert answer.logprobs == pytest.approx(want, abs=1e-4)
        assert answer.policy_version == version == sampler.policy_version

    sampler.update_weights(4, None)  # only says which version it was started with
    check(4, 0.9)
    new = {name: tensor * 1.2 for name, tensor in model.state_dict().items()}

    async def while_sampling() -> Completion:
        activity.take()
        sampler.begin(session(1))
        asked = asyncio.create_task(sampler.sample([1, 2], seeded(150), session(1)))
        while not activity.take():  # it has begun
            await asyncio.sleep(0.001)
        await asyncio.to_thread(sampler.update_weights, 5, new)
        answer = await asked
        sampler.end(session(1))
        return answer

    spanning = run(while_sampling())
    assert spanning.policy_version == 4
    if spanning.versions is not None:
        assert set(spanning.versions) == {4, 5} and list(spanning.versions) == sorted(spanning.versions)
    check(5, 1.2)

    with pytest.raises(ConfigurationError, match="no tensor 'nothing'"):
        sampler.update_weights(6, {"nothing": torch.zeros(1)})
    with pytest.raises(ConfigurationError, match="wants"):
        sampler.update_weights(6, {"lm_head.weight": torch.zeros(1)})

    def torn(*args: object) -> object:
        file = write_weights(*args)  # type: ignore[arg-type]
        os.truncate(file.file, file.size - 5)
        return file

    def corrupt(*args: object) -> object:
        file = write_weights(*args)  # type: ignore[arg-type]
        os.pwrite(file.file, b"\x7f", file.size - 2)
        return file

    for damage, words in ((torn, "torn"), (corrupt, "corrupt")):
        monkeypatch.setattr("envgrad.sampling.process.write_weights", damage)
        with pytest.raises(WeightTransferError, match=f"version 6 .*{words}.*the old version is kept"):
            sampler.update_weights(6, {name: tensor * 2 for name, tensor in new.items()})
    monkeypatch.undo()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    with pytest.raises(WeightTransferError, match="File too large"):
        sampler.update_weights(6, new)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check(5, 1.2)

    sampler.update_weights(7, {name: tensor * float("nan") for name, tensor in new.items()})
    for _ in range(2):  # what waits, and what asks later
        with pytest.raises(SamplerDied, match=r"FloatingPointError: .*diverged(.|\n)*Traceback"):
            run(ask(sampler, [(session(0), [1], seeded())]))
    with pytest.raises(SamplerDied, match="diverged"):
        sampler.update_weights(8, new)
    sampler.close()
    assert not listed(sampler.pid) and not sampler_threads() - before


FAKE = """
import os, signal, socket, sys, time
from envgrad.sampling.process_frames import Frame, FrameReader, receive_frames, send_frame
sock, reader, frames = socket.socket(fileno=int(sys.argv[1])), FrameReader(), []
def read(kind):
    while not any(frame.kind == kind for frame in frames):
        frames.extend(receive_frames(sock, reader))
read("start")
if "refused" in sys.argv:
    send_frame(sock, Frame(kind="refused", data={"error": "no such layer", "text": ""}))
    os._exit(1)
if "early" in sys.argv:
    os._exit(5)
send_frame(sock, Frame(kind="ready", data={"sampler": "Fake"}))
read("ask")
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
elif "left" in sys.argv:
    os._exit(7)
elif "failed" in sys.argv:
    send_frame(sock, Frame(kind="failed", data={"error": "MemoryError: full", "text": "Traceback: there"}))
elif "garbage" in sys.argv:
    sock.sendall(bytes([255]) * 64)
elif "deaf" in sys.argv:
    sock.close()
time.sleep(60)
"""
"""the other end of the socket, without a model"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ProcessSampler]:
    """Samplers whose process does one thing and no other."""

    def make(ending: str) -> ProcessSampler:
        def start(theirs: socket.socket, threads: int) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", FAKE, str(theirs.fileno()), ending]
            return subprocess.Popen(command, pass_fds=[theirs.fileno()])

        monkeypatch.setattr(process_link, "_start", start)
        monkeypatch.setattr(process_link, "POLL_SECONDS", 0.1)
        monkeypatch.setattr(process_link, "SILENT_POLLS", 600)  # while the interpreter starts
        monkeypatch.setattr(process_link, "END_SECONDS", 0.3)
        sampler = ProcessSampler(shared("llama"), max_sessions=2, max_context=64)
        monkeypatch.setattr(process_link, "SILENT_POLLS", 5)
        return sampler

    return make


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("killed", "is gone: SIGKILL ended it; the system does that when memory is short"),
        ("left", "is gone: it left with exit code 7"),
        ("failed", "failed: MemoryError: full(.|\n)*Traceback: there"),
        ("garbage", "something else was written"),
        ("silent", "no sign of life for 5 looks"),
        ("deaf", "is gone"),
    ],
)
def test_the_end_of_the_process_ends_every_wait_with_its_reason(
    fake: Callable[[str], ProcessSampler], ending: str, words: str
) -> None:
    threads = sampler_threads()
    sampler = fake(ending)
    began = time.monotonic()
    sampler.begin(session(0))
    for _ in range(2):  # what waits, and what asks later
        with pytest.raises(SamplerDied, match=words):
            run(sampler.sample([1], seeded(), session(0)))
    with pytest.raises(SamplerDied, match=words):
        sampler.update_weights(1, {})
    assert time.monotonic() - began < 60
    sampler.end(session(0))
    sampler.close()
    assert not listed(sampler.pid) and not sampler_threads() - threads


@pytest.mark.parametrize(
    ("ending", "error", "words"),
    [("refused", ConfigurationError, "no such layer"), ("early", SamplerDied, "exit code 5")],
)
def test_a_start_that_fails_is_told_and_leaves_nothing(
    fake: Callable[[str], ProcessSampler], ending: str, error: type[Exception], words: str
) -> None:
    gc.collect()
    threads, files = sampler_threads(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=words):
        fake(ending)
    assert not sampler_threads() - threads and len(os.listdir("/proc/self/fd")) <= files


def test_options_are_checked_before_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envgrad.sampling.process.ProcessLink", None)
    model = shared("llama")
    for options, words in (
        ({"max_sessions": 0}, "max_sessions must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"max_context": 161}, "from 2 to the model's 160 tokens"),
        ({"weights": {"a": torch.zeros(1, dtype=torch.complex64)}}, "complex64"),
    ):
        with pytest.raises((ConfigurationError, WeightTransferError), match=words):
            ProcessSampler(model, **{"max_sessions": 2, **options})

    class Own(LlamaForCausalLM):
        pass

    with pytest.raises(ConfigurationError, match=r"Own is defined in .* put it into a module"):
        ProcessSampler(Own(model.config), max_sessions=2)


@pytest.mark.parametrize("ending", ["stream", "garbage"])
def test_the_process_ends_with_its_stream(ending: str) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "envgrad.sampling.process_child", str(theirs.fileno()), str(os.getpid())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as child:
        theirs.close()
        if ending == "garbage":
            ours.sendall(b"\xff" * 64)
        ours.shutdown(socket.SHUT_WR)
        assert child.wait(20) == (1 if ending == "garbage" else 0)


def test_a_request_is_sent_as_it_is(sampler: ProcessSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Frame] = []
    monkeypatch.setattr(sampler._link, "send", sent.append)

    async def work() -> None:
        sampler.begin(session(0))
        asked = asyncio.create_task(sampler.sample([5, 6], SamplingParams(max_tokens=2, seed=9), session(0)))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        sampler.end(session(0))

    run(work())
    assert [frame.kind for frame in sent] == ["begin", "ask", "cancel", "end"]
    assert sent[1].columns == (array("i", [5, 6]),) and sent[1].data["params"]["seed"] == 9


def test_close_fails_what_is_open(sampler: ProcessSampler) -> None:
    """The last test of the module's process."""

    async def work() -> None:
        sampler.begin(session(0))
        sampler.begin(session(1))  # never asks: deterministic, so the first waits for it
        waiting = asyncio.create_task(sampler.sample([1], seeded(), session(0)))
        await asyncio.sleep(0.05)
        sampler.close()
        with pytest.raises(SamplerFailure, match="closed"):
            await waiting
        with pytest.raises(SamplerFailure, match="closed"):
            await sampler.sample([1], seeded(), session(1))

    run(work())
    sampler.close()
    assert not listed(sampler.pid)
