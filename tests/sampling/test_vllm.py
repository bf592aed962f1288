"""The sampler in front of servers that speak vLLM's language and run its worker extension."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_kit import ask, changed, logprobs_of, sampler_of, session, two_servers

from envgrad.errors import ConfigurationError, SamplerDied, SamplerFailure, WeightTransferError
from envgrad.sampling import vllm, vllm_server
from envgrad.sampling.sampler import Completion, SamplingParams
from envgrad.sampling.vllm import VLLMSampler
from envgrad.sampling.vllm_files import Published, WeightFolder
from envgrad.sampling.vllm_options import VLLMOptions
from envgrad.sampling.vllm_server import ServerFacts, VLLMServer
from envgrad.sampling.vllm_sync import FileTransport
from helpers.models import tiny_llama
from helpers.vllm_server import fake_vllm


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "LOOK_SECONDS", 0.1)


def test_tokens_in_and_tokens_with_logprobs_out(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama()) as fake, sampler_of(fake, folder=tmp_path, max_context=64) as sampler:
        params = SamplingParams(
            max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
            stop_token_ids=(7, 8), stop_strings=("no",), seed=(1 << 63) - 1,
        )  # fmt: skip
        (answer,) = ask(sampler, [(session("a"), [4, 5, 6])], params)
        assert answer.logprobs == pytest.approx(logprobs_of(fake.model, [4, 5, 6], answer, 0.7), abs=1e-5)
        assert answer.stop_reason in ("stop", "length") and answer.versions is None
        (body,) = fake.bodies()
        # Every option is said: what is left out would be the model's own default.
        assert body == {
            "model": "served", "prompt": [4, 5, 6], "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5,
            "min_p": 0.1, "repetition_penalty": 1.1, "seed": (1 << 63) - 1, "stop": ["no"], "stop_token_ids": [7, 8],
            "ignore_eos": True, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False,
            "include_stop_str_in_output": True, "add_special_tokens": False,
        }  # fmt: skip
        assert sampler.max_context == 64  # the server would take 256
        (short,) = ask(sampler, [(session("b"), list(range(4, 66)))])
        assert fake.bodies()[-1]["max_tokens"] == 2 and len(short.token_ids) <= 2
        with pytest.raises(SamplerFailure, match="64 tokens of prompt leave no room"):
            ask(sampler, [(session("c"), [4] * 64)])
        with pytest.raises(ConfigurationError, match="has not begun"):
            asyncio.run(sampler.sample([4], params, session("d")))


def test_which_logprobs_are_exact() -> None:
    def facts(mode: str, dtype: str = "float32") -> ServerFacts:
        return ServerFacts(
            model="m", max_context=9, num_workers=1, dtype=dtype, logprobs_mode=mode, has_lora=False, shape={}
        )

    plain, warm = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, temperature=0.7)
    cut = SamplingParams(max_tokens=1, top_p=0.9)
    assert [facts("raw_logprobs").exact(one) for one in (plain, warm, cut)] == [True, False, True]
    assert [facts("processed_logprobs").exact(one) for one in (plain, warm, cut)] == [True, True, False]
    penalised = SamplingParams(max_tokens=1, repetition_penalty=1.1)
    assert not facts("processed_logprobs").exact(penalised)
    assert not facts("processed_logprobs", "bfloat16").exact(plain) and not facts("raw_logits").exact(plain)


def test_the_trainer_recomputes_where_one_temperature_is_not_exact(tmp_path: Path) -> None:
    both = (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, temperature=0.5))
    with fake_vllm(tiny_llama(), logprobs_mode="raw_logprobs") as fake:
        with sampler_of(fake, folder=tmp_path) as sampler:
            assert sampler.exact_logprobs
        with sampler_of(fake, folder=tmp_path, exact_for=both) as sampler:
            assert not sampler.exact_logprobs


def test_sessions_stay_with_a_server_and_go_to_the_one_with_fewest(tmp_path: Path) -> None:
    with two_servers(tmp_path) as (one, two, sampler):
        params = SamplingParams(max_tokens=1)

        async def play() -> list[tuple[int, int]]:
            seen = []
            for number, key in enumerate(("a", "b", "c", "a", "b", "a")):
                here, there = len(one.bodies()), len(two.bodies())
                group = "x" if key in ("b", "c") else "y"
                if number < 3:
                    sampler.begin(session(key, group))
                await sampler.sample([5, 6], params, session(key, group))
                seen.append((len(one.bodies()) - here, len(two.bodies()) - there))
            return seen

        # a to the first; b to the second, which has fewer; c beside its sibling b, where both have as many
        assert asyncio.run(play()) == [(1, 0), (0, 1), (0, 1), (1, 0), (0, 1), (1, 0)]
        sampler.end(session("b"))
        sampler.end(session("c"))
        ask(sampler, [(session("d"), [5])], params)
        assert len(two.bodies()) == 4  # where nobody is left


def test_a_failing_server_is_asked_again_and_a_refusing_one_ends_the_run(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama(), key="hush") as fake:
        refused = pytest.raises(ConfigurationError, match=r"status 401.*vllm_api_key_env")
        with refused, sampler_of(fake, folder=tmp_path):
            pass
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KEY", "hush")
            with sampler_of(fake, folder=tmp_path, api_key_env="KEY", retry_timeout=30.0) as sampler:
                fake.interfere = lambda path, body, number: (
                    (503, "busy") if path == "/v1/completions" and number < 2 else None
                )
                (answer,) = ask(sampler, [(session("a"), [5])])
                assert len(answer.token_ids) >= 1 and sampler.retries == 2
                fake.interfere = lambda path, body, number: (
                    (400, "top_k must be hush") if path == "/v1/completions" else None
                )
                with pytest.raises(ConfigurationError, match=r"refuses .* status 400: top_k must be \*\*\*"):
                    ask(sampler, [(session("b"), [5])])
            with sampler_of(fake, folder=tmp_path, api_key_env="KEY", retry_timeout=1.0) as sampler:
                fake.interfere = lambda path, body, number: (500, "broken") if path == "/v1/completions" else None
                began = time.monotonic()
                with pytest.raises(SamplerFailure, match="tried for 1 s: status 500"):
                    ask(sampler, [(session("c"), [5])])
                assert time.monotonic() - began < 20
                fake.interfere = lambda path, body, number: (200, '{"choices": [{"token_ids": [1, 2]}]}')
                with pytest.raises(SamplerFailure, match="2 token ids and 0 log-probs"):
                    ask(sampler, [(session("d"), [5])])


def test_a_slow_server_is_given_its_time_and_no_more(tmp_path: Path) -> None:
    over = threading.Event()
    patience = {"request_timeout": 5.0, "retry_timeout": 0.1}
    with fake_vllm(tiny_llama()) as fake, sampler_of(fake, folder=tmp_path, **patience) as sampler:

        def slow(path: str, body: dict[str, Any], number: int) -> None:
            if path == "/v1/completions":
                over.wait(0.3 if number == 0 else 20.0)

        fake.interfere = slow
        ask(sampler, [(session("a"), [5])])
        began = time.monotonic()
        with pytest.raises(SamplerFailure, match=r"no answer to /v1/completions within"):
            ask(sampler, [(session("b"), [5])])
        assert time.monotonic() - began < 18
        over.set()


def test_a_killed_server_ends_the_run_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "DEATH_SECONDS", 0.5)
    with fake_vllm(tiny_llama()) as fake:
        fake.kill_at(0)
        with sampler_of(fake, folder=tmp_path, request_timeout=60, retry_timeout=30) as sampler:
            began = time.monotonic()
            with pytest.raises(SamplerDied, match=rf"no vLLM server is left: {fake.url}: \w+Error"):
                ask(sampler, [(session("a"), [5])], SamplingParams(max_tokens=200))
            assert time.monotonic() - began < 25
            with pytest.raises(SamplerDied, match="no vLLM server is left to take version 1"):
                sampler.update_weights(1, changed(tiny_llama()))
            assert sampler.policy_version == 0


def test_sessions_of_a_lost_server_go_on_at_another(tmp_path: Path) -> None:
    with two_servers(tmp_path) as (one, two, sampler):
        one.kill_at(0)
        (answer,) = ask(sampler, [(session("a"), [5])], SamplingParams(max_tokens=40, seed=1))
        assert len(answer.token_ids) == 40 and len(one.bodies()) == len(two.bodies()) == 1
        weights = changed(tiny_llama())
        sampler.update_weights(1, weights)  # those that are there
        assert sampler.policy_version == 1
        assert torch.equal(two.model.model.norm.weight, weights["model.norm.weight"])


def test_a_server_that_was_started_again_waits_for_the_next_weights(tmp_path: Path) -> None:
    with two_servers(tmp_path) as (one, two, sampler):
        weights = changed(tiny_llama())
        sampler.update_weights(1, weights)
        port = int(one.url.rpartition(":")[2])
        one.kill()
        _until(lambda: sampler.servers[0].state == "down")
        with fake_vllm(tiny_llama(), port=port) as again:
            _until(lambda: sampler.servers[0].state == "stale")
            ask(sampler, [(session("a"), [5])])
            assert not again.bodies() and len(two.bodies()) == 1
            sampler.update_weights(2, weights)
            ask(sampler, [(session("b"), [5])])
            assert len(again.bodies()) == 1


def _until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_after_an_update_the_servers_logprobs_are_the_trainers(tmp_path: Path, tied: bool) -> None:
    trainer, served = tiny_llama(tie_word_embeddings=tied), tiny_llama(tie_word_embeddings=tied)
    with fake_vllm(served) as fake, sampler_of(fake, folder=tmp_path) as sampler:
        trainer.load_state_dict(changed(trainer), strict=False)
        (before,) = ask(sampler, [(session("a"), [5, 6])])
        assert before.logprobs != pytest.approx(logprobs_of(trainer, [5, 6], before), abs=1e-2)
        sampler.update_weights(4, trainer.state_dict())
        (after,) = ask(sampler, [(session("b"), [5, 6])])
        assert after.logprobs == pytest.approx(logprobs_of(trainer, [5, 6], after), abs=1e-5)
        assert after.policy_version == sampler.policy_version == 4
        calls = [path for path, _ in fake.requests if path not in ("/health", "/v1/completions")]
        assert calls[-4:] == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
        assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == ["lock"]  # the file is gone


@pytest.mark.parametrize("fault", ["torn", "corrupt", "missing"])
def test_what_did_not_arrive_whole_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    write = WeightFolder.write

    def spoil(self: WeightFolder, *args: Any, **kwargs: Any) -> Published:
        ready = write(self, *args, **kwargs)
        raw = ready.path.read_bytes()
        if fault == "torn":
            ready.path.write_bytes(raw[:-40])
        elif fault == "corrupt":
            ready.path.write_bytes(raw[:-8] + b"\x00\x00\x80\x7f" + raw[-4:])
        else:
            ready.path.unlink()
        return ready

    served = tiny_llama()
    before = {name: weight.clone() for name, weight in served.state_dict().items()}
    with fake_vllm(served) as fake, sampler_of(fake, folder=tmp_path) as sampler:
        sampler.update_weights(1, before)
        monkeypatch.setattr(WeightFolder, "write", spoil)
        said = "No such file" if fault == "missing" else "is torn or corrupt: SHA-256"
        with pytest.raises(
            WeightTransferError, match=rf"(?s){fake.url}, worker 0: .*{said}.*It still serves version 1"
        ):
            sampler.update_weights(2, changed(served))
        assert sampler.policy_version == 1 and fake.workers[0].envgrad_status()["version"] == 1
        assert all(torch.equal(weight, before[name]) for name, weight in served.state_dict().items())
        (answer,) = ask(sampler, [(session("a"), [5])])  # it goes on
        assert answer.policy_version == 1 and not fake.paused
        monkeypatch.undo()
        sampler.update_weights(2, changed(served))
        assert sampler.policy_version == 2


def test_weights_that_were_applied_in_part_are_never_sampled_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "DEATH_SECONDS", 0.3)
    with fake_vllm(tiny_llama()) as fake, sampler_of(fake, folder=tmp_path) as sampler:
        fake.workers[0].loaded.fail_after = 3
        with pytest.raises(WeightTransferError, match="cannot place"):
            sampler.update_weights(1, changed(tiny_llama()))
        with pytest.raises(SamplerDied, match="failed half way"):
            ask(sampler, [(session("a"), [5])])
        fake.workers[0].loaded.fail_after = None
        sampler.update_weights(2, changed(tiny_llama()))
        assert ask(sampler, [(session("b"), [5])])[0].policy_version == 2


def test_a_server_that_keeps_old_keys_and_values_is_not_used(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama()) as fake, sampler_of(fake, folder=tmp_path) as sampler:
        fake.interfere = lambda path, body, number: (
            (200, '{"success": false}') if path == "/reset_prefix_cache" else None
        )
        with pytest.raises(WeightTransferError, match="could not forget keys and values"):
            sampler.update_weights(1, changed(tiny_llama()))
        assert sampler.servers[0].state == "stale" and not fake.paused


def _in_background(sampler: VLLMSampler, params: SamplingParams, found: list[Completion]) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.extend(ask(sampler, [(session("a"), [5, 6])], params)))
    thread.start()
    return thread


def test_an_update_cuts_answers_and_each_token_tells_its_version(tmp_path: Path) -> None:
    trainer, served = tiny_llama(), tiny_llama()
    options = {"in_flight": "abort", "request_timeout": 60}
    with fake_vllm(served) as fake, sampler_of(fake, folder=tmp_path, **options) as sampler:
        fake.token_seconds = 0.2
        old, new, found = changed(trainer, 1), changed(trainer, 2), []
        sampler.update_weights(1, old)
        thread = _in_background(sampler, SamplingParams(max_tokens=60, seed=9), found)
        _until(lambda: fake.sampled > 1)
        sampler.update_weights(2, new)
        fake.token_seconds = 0.0
        thread.join()
        (answer,) = found
        assert len(answer.token_ids) == len(answer.logprobs) == 60 and answer.policy_version == 1
        assert answer.versions is not None
        cut = answer.versions.index(2)
        assert 0 < cut < 60 and answer.versions == (1,) * cut + (2,) * (60 - cut)
        first, second = fake.bodies()
        assert second["prompt"] == [5, 6, *answer.token_ids[:cut]] and second["max_tokens"] == 60 - cut
        assert second["seed"] != first["seed"]
        trainer.load_state_dict(old)
        assert answer.logprobs[:cut] == pytest.approx(logprobs_of(trainer, [5, 6], answer)[:cut], abs=1e-5)
        trainer.load_state_dict(new)
        assert answer.logprobs[cut:] == pytest.approx(logprobs_of(trainer, [5, 6], answer)[cut:], abs=1e-5)


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_an_update_waits_for_answers_where_asked_or_where_a_stop_string_could_be_cut(
    tmp_path: Path, in_flight: str
) -> None:
    with fake_vllm(tiny_llama()) as fake, sampler_of(fake, folder=tmp_path, in_flight=in_flight) as sampler:
        fake.token_seconds = 0.01
        stops = ("x",) if in_flight == "abort" else ()
        found: list[Completion] = []
        thread = _in_background(sampler, SamplingParams(max_tokens=40, stop_strings=stops), found)
        _until(lambda: fake.sampled > 0)
        sampler.update_weights(1, changed(tiny_llama()))
        assert len(fake.bodies()) == 1  # one request, answered whole
        thread.join()
        assert found[0].policy_version == 0 and found[0].versions is None and len(found[0].token_ids) == 40


def test_a_request_that_a_paused_server_only_holds_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between the sampler's pause and the end of it: the server will not answer before it is resumed."""
    monkeypatch.setattr(vllm_server, "ABORT_SECONDS", 0.2)
    with fake_vllm(tiny_llama()) as fake, sampler_of(fake, folder=tmp_path, in_flight="abort") as sampler:
        fake.paused = True
        found: list[Completion] = []
        thread = _in_background(sampler, SamplingParams(max_tokens=4), found)
        _until(lambda: len(fake.bodies()) == 1)
        sampler.update_weights(1, changed(tiny_llama()))
        thread.join()
        assert found[0].policy_version == 1 and found[0].versions is None
        assert len(fake.bodies()) == 2 and sampler.retries == 0


def test_what_is_no_server_to_train_through_is_said_at_construction(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama()) as fake:
        fake.interfere = lambda path, body, number: (404, "Not Found") if path == "/collective_rpc" else None
        with pytest.raises(ConfigurationError, match=r"404.*envgrad vllm-serve"), sampler_of(fake, folder=tmp_path):
            pass
        fake.interfere = lambda path, body, number: (500, "no attribute") if path == "/collective_rpc" else None
        with pytest.raises(ConfigurationError, match="adds the worker extension"), sampler_of(fake, folder=tmp_path):
            pass
        fake.interfere = lambda path, body, number: None
        fake.workers[0].envgrad_digest = lambda path: {"rank": 0, "error": "FileNotFoundError"}  # type: ignore
        with pytest.raises(ConfigurationError, match="does not see the folder"), sampler_of(fake, folder=tmp_path):
            pass
    with (
        fake_vllm(tiny_llama(), replicas=2) as fake,
        pytest.raises(ConfigurationError, match="2 data-parallel replicas"),
        sampler_of(fake, folder=tmp_path),
    ):
        pass
    with pytest.raises(ConfigurationError, match=r"no vLLM server answers at .* within vllm_server_timeout=0\.2 s"):
        VLLMSampler(VLLMOptions(base_urls=("http://127.0.0.1:9",), server_timeout=0.2), _never)


def _never(servers: Sequence[VLLMServer]) -> FileTransport:
    raise AssertionError("there is no server")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_urls": ()}, "must name each server once"),
        ({"base_urls": ("http://a:1", "http://a:1/v1")}, "must name each server once"),
        ({"base_urls": ("a:1",)}, "is no URL"),
        ({"base_urls": ("http://a",), "request_timeout": 0}, "request_timeout=0 must be above 0"),
        ({"base_urls": ("http://a",), "max_context": 1}, "max_context=1 must be at least 2"),
        ({"base_urls": ("http://a",), "in_flight": "keep"}, "must be wait or abort"),
        ({"base_urls": ("http://a",), "api_key_env": "NOT_SET_ANYWHERE"}, "no such environment variable"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        VLLMOptions(**options)
