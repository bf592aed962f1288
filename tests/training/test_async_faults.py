"""What goes wrong at a server while training goes on beside it: the documented end, within its deadline."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import envgrad
from envgrad.errors import ConfigurationError, SamplerDied, SamplerFailure, TooManyFailures, WeightTransferError
from envgrad.sampling import vllm, vllm_files
from helpers.models import Letters, flat, tiny_llama, tokenizer_of
from helpers.trainers import logged
from helpers.vllm_server import FakeVLLM, fake_vllm

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(vllm_files, "SHARED_MEMORY", folder)
    return folder


class Closing(Letters):
    made = closed = 0

    def __init__(self) -> None:
        type(self).made += 1

    def close(self) -> None:
        type(self).closed += 1


def make(fake: FakeVLLM, folder: Path, *, kind: str = "GRPO", **options: Any) -> tuple[Any, type[Closing]]:
    class Counted(Closing):
        pass

    given: dict[str, Any] = {
        "output_dir": str(folder / "run"), "max_steps": 1000, "per_device_train_batch_size": 4, "num_generations": 2,
        "max_completion_length": 12, "learning_rate": 0.02, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "asynchronous": True,
        "max_staleness": 2, "vllm_server_base_url": fake.url, "max_episode_retries": 0,
        "max_consecutive_failed_groups": 2, "log_episodes": False,
    }  # fmt: skip
    trainer = getattr(envgrad, f"{kind}Trainer")(
        tiny_llama(), args=getattr(envgrad, f"{kind}Config")(**(given | options)), processing_class=tokenizer_of(),
        environment_factory=Counted,
    )  # fmt: skip
    return trainer, Counted


def ends(trainer: Any, environment: type[Closing], error: type[BaseException], words: str, seconds: float) -> Any:
    """Training ends by ``error`` within ``seconds``, and leaves nothing behind."""
    began = time.monotonic()
    with pytest.raises(error, match=words) as found:
        trainer.train()
    assert time.monotonic() - began < seconds
    assert trainer.state.global_step > 0, "it had begun"
    assert environment.made == environment.closed > 0
    names = [thread.name for thread in threading.enumerate()]
    assert "envgrad-rollouts" not in names and "envgrad-sampler" not in names
    return found.value


def begun(number: int) -> bool:
    """Whether so many requests are enough of a run before the trouble begins."""
    return number >= 24


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "SDPO"])
def test_a_server_samples_beside_training_for_every_algorithm(kind: str, tmp_path: Path, shared_memory: Path) -> None:
    with fake_vllm(tiny_llama(seed=5)) as fake:
        own = {"success_reward_threshold": 0.3} if kind == "SDPO" else {}
        trainer, _ = make(fake, tmp_path, kind=kind, max_steps=5, **own)
        before = flat(trainer.model)
        trainer.train()
        assert trainer.state.global_step == 5 and not torch.equal(before, flat(trainer.model))
        assert max(logged(trainer, "async/staleness_max")) <= 2
        # the last publish was of step 4, and the server has it whole
        assert fake.workers[0].envgrad_status()["version"] == 4
    assert not any(shared_memory.iterdir())


def test_a_refusal_ends_the_run_at_once_with_the_servers_words(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama()) as fake:
        fake.interfere = lambda path, body, number: (
            (422, "seed must be odd") if path == "/v1/completions" and begun(number) else None
        )
        trainer, environment = make(fake, tmp_path)
        ends(trainer, environment, ConfigurationError, "status 422: seed must be odd", 20)


def test_a_server_that_is_too_slow_fails_episodes_and_too_many_of_them_end_the_run(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama()) as fake:

        def slow(path: str, body: dict[str, Any], number: int) -> None:
            if path == "/v1/completions" and begun(number):
                time.sleep(12.0)

        fake.interfere = slow
        trainer, environment = make(
            fake, tmp_path, vllm_request_timeout=3.0, vllm_retry_timeout=0.1, save_strategy="steps", save_steps=500
        )
        error = ends(trainer, environment, TooManyFailures, "2 groups in a row", 60)
        assert isinstance(error.__cause__, SamplerFailure) and "no answer to /v1/completions" in str(error.__cause__)
        assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


def test_a_killed_server_ends_the_run_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "DEATH_SECONDS", 0.5)
    with fake_vllm(tiny_llama()) as fake:

        def kill(path: str, body: dict[str, Any], number: int) -> None:
            if path == "/v1/completions" and number == 24:
                threading.Thread(target=fake.kill).start()

        fake.interfere = kill
        trainer, environment = make(fake, tmp_path, save_strategy="steps", save_steps=500)
        ends(trainer, environment, SamplerDied, re.escape(fake.url), 20)
        assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


def test_a_run_goes_on_at_the_servers_that_are_left(tmp_path: Path) -> None:
    with fake_vllm(tiny_llama(seed=5)) as one, fake_vllm(tiny_llama(seed=6)) as two:

        def kill(path: str, body: dict[str, Any], number: int) -> None:
            if path == "/v1/completions" and number == 12:
                threading.Thread(target=two.kill).start()

        two.interfere = kill
        trainer, environment = make(one, tmp_path, max_steps=16, vllm_server_base_url=[one.url, two.url])
        trainer.train()
        assert trainer.state.global_step == 16 and environment.made == environment.closed
        assert two.bodies() and len(one.bodies()) > len(two.bodies())
        assert set(logged(trainer, "groups/dropped")) == {0.0}, "no episode was lost"
        assert max(logged(trainer, "async/staleness_max")) <= 2
        assert one.workers[0].envgrad_status()["version"] == 15


def test_a_full_disk_at_a_publish_ends_the_run_and_the_old_version_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_memory: Path
) -> None:
    write, written = vllm_files.write_all, []

    def full(file: Any, part: Any) -> None:
        if file.name.endswith("weights-3.safetensors.unfinished"):
            raise OSError(28, "No space left on device")
        written.append(file.name)
        write(file, part)

    monkeypatch.setattr(vllm_files, "write_all", full)
    with fake_vllm(tiny_llama()) as fake:
        trainer, environment = make(fake, tmp_path)
        ends(trainer, environment, WeightTransferError, "version 3 of the policy.*No space left on device", 20)
        assert fake.workers[0].envgrad_status()["version"] == 2 and not fake.paused
    assert written and not any(shared_memory.iterdir())
