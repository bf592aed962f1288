"""Against vLLM itself: ``make test-vllm``, or ``VLLM_PYTHON=.../bin/python pytest tests/vllm/test_vllm_real.py``."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "sampling"))

from vllm_kit import ask, changed, logprobs_of, session

import envgrad
from envgrad.errors import SamplerDied, WeightTransferError
from envgrad.sampling.sampler import Completion, SamplingParams
from envgrad.sampling.vllm import VLLMSampler
from envgrad.sampling.vllm_files import Published, WeightFolder
from envgrad.sampling.vllm_options import VLLMOptions
from envgrad.sampling.vllm_sync import FileTransport
from envgrad.starter import STARTER_PATH, load_starter
from helpers.models import Letters

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python that has vLLM"),
    pytest.mark.timeout(900),
]
ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
KEY = "ENVGRAD_TEST_VLLM_KEY"


def small_llama(tied: bool = True) -> LlamaForCausalLM:
    """The least that vLLM's attention on a CPU takes: 32 numbers a head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=600, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=tied, eos_token_id=7,
        pad_token_id=0, bos_token_id=None, initializer_range=0.125,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STARTER_PATH / name, folder / name)
    return folder


@dataclass
class Served:
    url: str
    folder: Path
    process: subprocess.Popen[bytes]
    seconds: float
    """from the start until it was ready"""

    @property
    def server_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])


@contextmanager
def serve(folder: Path, log: Path, *more: str) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "envgrad", "vllm-serve", "--model", str(folder), "--python", str(PYTHON)]
    command += ["--port", str(port), "--api-key-env", KEY, "--startup-timeout", "400", *ARGUMENTS, *more]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", KEY: os.environ[KEY], "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        while "ready: http" not in log.read_text(errors="replace"):
            assert process.poll() is None and time.monotonic() - began < 500, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        yield Served(f"http://127.0.0.1:{port}", folder, process, time.monotonic() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


@pytest.fixture(scope="module", autouse=True)
def _key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, "hush")
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    with serve(save(small_llama(), folder), folder.parent / "serve.log") as running:
        print(f"\nvLLM was ready after {running.seconds:.0f} s")
        before = set(Path("/dev/shm").glob("envgrad-weights-*"))
        yield running
        assert set(Path("/dev/shm").glob("envgrad-weights-*")) <= before


@contextmanager
def sampler_of(served: Served, **options: Any) -> Iterator[VLLMSampler]:
    made = VLLMSampler(
        VLLMOptions(base_urls=(served.url,), api_key_env=KEY, **options),
        lambda servers: FileTransport(WeightFolder(), timeout=60.0),
    )
    try:
        yield made
    finally:
        made.close()


def test_after_publishes_the_logprobs_of_100_rows_are_the_trainers(served: Served) -> None:
    trainer, draw = small_llama(), random.Random(0)
    with sampler_of(served) as sampler:
        assert sampler.max_context == 512 and sampler.exact_logprobs
        for version in (1, 2):
            trainer.load_state_dict(changed(trainer, version), strict=False)
            sampler.update_weights(version, trainer.state_dict())
            prompts = [[draw.randrange(10, 600) for _ in range(draw.randrange(1, 60))] for _ in range(50)]
            asked = [(session(f"{version}/{number}"), prompt) for number, prompt in enumerate(prompts)]
            answers = ask(sampler, asked, SamplingParams(max_tokens=24, temperature=0.8, seed=version))
            worst = 0.0
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.policy_version == version and len(answer.token_ids) == len(answer.logprobs)
                own = torch.tensor(logprobs_of(trainer, prompt, answer, 0.8))
                worst = max(worst, float((own - torch.tensor(answer.logprobs)).abs().max()))
            print(f"version {version}: largest difference {worst:.1e}")
            assert worst < 1e-3


def test_stop_tokens_and_stop_strings_end_an_answer_and_stay_in_it(served: Served) -> None:
    with sampler_of(served) as sampler:
        stops = tuple(range(100, 300))
        asked = [(session(str(number)), [20, 21, 22]) for number in range(8)]
        for answer in ask(sampler, asked, SamplingParams(max_tokens=200, stop_token_ids=stops, seed=1)):
            assert answer.stop_reason == "stop" and answer.token_ids[-1] in stops
            assert not set(answer.token_ids[:-1]) & set(stops)
        (free,) = ask(sampler, [(session("x"), [20])], SamplingParams(max_tokens=80, seed=5))
        (again,) = ask(sampler, [(session("x"), [20])], SamplingParams(max_tokens=80, seed=5))
        assert free.token_ids == again.token_ids and free.stop_reason == "length"  # id 7, its eos, does not end it
        _, tokenizer = load_starter()
        text = tokenizer.decode(free.token_ids)
        word = next(word for word in re.findall(r"[a-z]{3,}", text[10:]))
        params = SamplingParams(max_tokens=80, seed=5, stop_strings=(word,))
        (stopped,) = ask(sampler, [(session("x"), [20])], params)
        assert stopped.stop_reason == "stop" and word in tokenizer.decode(stopped.token_ids)
        assert word not in tokenizer.decode(stopped.token_ids[:-1])
        assert free.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_a_corrupt_publish_is_kept_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write = WeightFolder.write

    def spoil(self: WeightFolder, *args: Any, **kwargs: Any) -> Published:
        ready = write(self, *args, **kwargs)
        with open(ready.path, "r+b") as file:
            file.seek(-9, os.SEEK_END)
            file.write(b"torn")
        return ready

    trainer = small_llama()
    with sampler_of(served) as sampler:
        sampler.update_weights(10, trainer.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(WeightFolder, "write", spoil)
            with pytest.raises(WeightTransferError, match=r"torn or corrupt.*It still serves version 10"):
                sampler.update_weights(11, changed(trainer))
        (answer,) = ask(sampler, [(session("a"), [30, 31])])
        assert answer.policy_version == 10
        assert answer.logprobs == pytest.approx(logprobs_of(trainer, [30, 31], answer), abs=1e-3)


def test_an_update_cuts_an_answer_which_goes_on_without_old_keys_and_values(served: Served) -> None:
    trainer = small_llama()
    old, new = changed(trainer, 1), changed(trainer, 2)
    with sampler_of(served, in_flight="abort") as sampler:
        sampler.update_weights(20, old)
        found: list[Completion] = []
        params = SamplingParams(max_tokens=400, seed=9)
        thread = threading.Thread(target=lambda: found.extend(ask(sampler, [(session("a"), [30, 31])], params)))
        thread.start()
        time.sleep(0.7)
        sampler.update_weights(21, new)
        thread.join()
        (answer,) = found
        assert answer.versions is not None and len(answer.token_ids) == 400
        cut = answer.versions.index(21)
        assert 0 < cut < 400 and set(answer.versions[:cut]) == {20} and set(answer.versions[cut:]) == {21}
        trainer.load_state_dict(old, strict=False)
        assert answer.logprobs[:cut] == pytest.approx(logprobs_of(trainer, [30, 31], answer)[:cut], abs=1e-3)
        trainer.load_state_dict(new, strict=False)
        assert answer.logprobs[cut:] == pytest.approx(logprobs_of(trainer, [30, 31], answer)[cut:], abs=1e-3)


def test_nothing_but_health_is_open_without_the_key(served: Served) -> None:
    for path, status in (("/health", 200), ("/v1/models", 401), ("/is_paused", 401)):
        try:
            with urllib.request.urlopen(served.url + path) as response:
                assert response.status == status
        except urllib.error.HTTPError as error:
            assert error.code == status, path


def even(completions: list[Any], **_: Any) -> list[float]:
    """The share of even characters: any model earns rewards that differ, also where a limit ends its answer."""
    texts = ["".join(message["content"] for message in chat) for chat in completions]
    return [sum(ord(letter) % 2 == 0 for letter in text) / max(1, len(text)) for text in texts]


def trainer_of(served: Served, folder: Path, **options: Any) -> Any:
    peft = options.pop("peft_config", None)
    defaults: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 24, "learning_rate": 0.01, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "use_vllm": True,
        "vllm_mode": "server", "vllm_server_base_url": served.url, "vllm_api_key_env": KEY,
    }  # fmt: skip
    return envgrad.GRPOTrainer(
        str(served.folder),
        args=envgrad.GRPOConfig(**(defaults | options)),
        environment_factory=Letters,
        reward_funcs=even,
        **({} if peft is None else {"peft_config": peft}),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_grpo_runs_through_it(served: Served, tmp_path: Path, asynchronous: bool) -> None:
    trainer = trainer_of(served, tmp_path, asynchronous=asynchronous)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == 4
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    logs = [entry["sampler_mismatch"] for entry in trainer.state.log_history if "sampler_mismatch" in entry]
    assert logs and (asynchronous or max(logs) < 1e-3)
    if not asynchronous:
        versions = {number for group in trainer.last_round.groups for one in group.episodes for number in one.versions}
        assert versions == {-1, 3}
    with trainer.rollouts.open():
        (answer,) = ask(trainer.rollouts.sampler, [(session("a"), [30, 31])])
    assert answer.logprobs == pytest.approx(logprobs_of(trainer.model.eval(), [30, 31], answer), abs=1e-3)


def killed(run: Any, running: Served) -> None:
    """Kill the server while ``run`` trains: it ends with an error that names the server, in seconds."""
    at: list[float] = []

    def kill() -> None:
        os.kill(running.server_pid, signal.SIGKILL)
        at.append(time.monotonic())

    threading.Timer(5.0, kill).start()
    with pytest.raises((SamplerDied, WeightTransferError), match=re.escape(running.url)):
        run.train()
    print(f"the run ended {time.monotonic() - at[0]:.1f} s after the kill")
    assert time.monotonic() - at[0] < 20
    assert running.process.wait(60) != 0


def test_adapters_are_loaded_as_adapters_and_a_kill_ends_the_run_in_seconds(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = save(small_llama(), tmp_path / "model")
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with serve(folder, tmp_path / "serve.log", "--enable-lora", "--max-lora-rank", "8") as running:
        trainer = trainer_of(running, tmp_path / "run", peft_config=lora)
        trainer.train()
        with trainer.rollouts.open():
            assert trainer.rollouts.sampler.takes_adapters
            (answer,) = ask(trainer.rollouts.sampler, [(session("a"), [30, 31])])
        own = logprobs_of(trainer.model.eval(), [30, 31], answer)
        print(f"largest difference {max(abs(a - b) for a, b in zip(own, answer.logprobs, strict=True)):.1e}")
        assert answer.logprobs == pytest.approx(own, abs=1e-3)
        killed(trainer_of(running, tmp_path / "killed", max_steps=10_000, peft_config=lora), running)


def test_a_head_of_its_own_follows_too_and_a_kill_ends_an_asynchronous_run_in_seconds(tmp_path: Path) -> None:
    trainer = small_llama(tied=False)
    folder = save(trainer, tmp_path / "model")
    with serve(folder, tmp_path / "serve.log") as running:
        with sampler_of(running) as sampler:
            trainer.load_state_dict(changed(trainer))
            sampler.update_weights(1, trainer.state_dict())
            (answer,) = ask(sampler, [(session("a"), [30, 31])])
            assert answer.logprobs == pytest.approx(logprobs_of(trainer, [30, 31], answer), abs=1e-3)
        killed(trainer_of(running, tmp_path / "run", max_steps=10_000, asynchronous=True), running)
