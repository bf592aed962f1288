"""The same tests on every trainer: a tiny model whose answers are scripted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import envgrad
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.training import rollouts
from helpers.models import tiny_llama, tokenizer_of

NAMES = ("GRPO", "RLOO", "SDPO", "AsyncGRPO")
"""algorithms with a trainer and a configuration each"""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the trainers."""

    name: str

    def config(self, folder: Path, **changes: object) -> Any:
        options: dict[str, object] = {
            "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4,
            "max_completion_length": 256, "learning_rate": 0.05, "lr_scheduler_type": "constant", "logging_steps": 1,
            "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        }  # fmt: skip
        if self.name == "AsyncGRPO" and changes.get("deterministic"):
            options["max_staleness"] = 0  # with more, the clock decides
        return getattr(envgrad, f"{self.name}Config")(**(options | changes))

    def make(self, folder: Path, model: object = None, **given: Any) -> Any:
        """A trainer; arguments of the trainer by name, of the configuration in ``options``."""
        options = given.pop("options", {})
        return getattr(envgrad, f"{self.name}Trainer")(
            sober_llama() if model is None else model,
            args=self.config(folder, **options),
            processing_class=given.pop("processing_class", tokenizer_of()),
            **given,
        )


def sober_llama() -> Any:
    """A tiny model that stops at its end-of-turn token only."""
    model = tiny_llama()
    model.generation_config.eos_token_id = tokenizer_of().eos_token_id
    return model


def script(monkeypatch: pytest.MonkeyPatch, answers: object, latency: float = 0.0) -> list[ScriptedSampler]:
    """Let trainers sample ``answers`` from now on; returns the samplers that they open."""
    opened: list[ScriptedSampler] = []

    def make(*args: object, **kwargs: object) -> ScriptedSampler:
        opened.append(ScriptedSampler(answers, max_context=4096, latency=latency))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(rollouts, "make_local_sampler", make)
    return opened


def by_sibling(*scripts: list[list[int]]) -> Callable[..., list[int]]:
    """A script for each sibling (in turn where there are more siblings than scripts)."""
    turns: dict[str, int] = {}

    def answer(prompt_ids: object, params: object, session: Any) -> list[int]:
        index = turns.get(session.key, 0)
        turns[session.key] = index + 1
        return scripts[session.order[1] % len(scripts)][index]

    return answer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
