"""A training run in a process of its own that may kill itself anywhere; ``zygote`` runs it, again and again.

A life goes on from the newest checkpoint, if there is one, and ends by a signal at the event that its spec names, or
with the run. Events are counted from the moment that ``train`` is called:

=============  =========================================================================================
``rollout``    an environment is reset, or hears a turn
``publish``    weights are about to be served, or are served
``micro``      backward of a micro-batch is about to begin
``optimizer``  the optimizer is about to step, or has stepped
``save``       a file of a checkpoint is opened for writing, a folder is made, renamed or removed
``load``       a file of a checkpoint is opened for reading
=============  =========================================================================================
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import envgrad
import envgrad.training.trainers  # so that lives need not import it
from envgrad.environments.contract import StepResult
from envgrad.errors import EnvironmentFailure
from envgrad.training.rollouts import Rollouts
from helpers.models import Letters, flat, tiny_llama, tokenizer_of

EVENTS = ("rollout", "publish", "micro", "optimizer", "save", "load")

WITHIN_ROUNDS = {"gradient_accumulation_steps": 2, "steps_per_generation": 6}
"""rounds of 24 episodes, of which each optimizer step takes 8"""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"temperature": 0.9, "top_p": 0.9, "learning_rate": 0.2},
    "passes": {"num_iterations": 2},
    "rounds": WITHIN_ROUNDS,
    "all": WITHIN_ROUNDS | {"num_iterations": 2, "save_steps": 2, "save_total_limit": 2},
    "short rounds": {"steps_per_generation": 3},
    "moving": {},
    "mixture": {"environment_weights": {"letters": 2.0, "vowels": 1.0}, "curriculum": "variance"},
}

_REFERENCE = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}
MOVING: dict[str, dict[str, Any]] = {
    "GRPO": _REFERENCE | {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 100.0},
    "RLOO": _REFERENCE,
    "SDPO": {"teacher_update_rate": 0.3},
}
"""what moves beside the policy: a coefficient, a reference, a teacher"""


class Events:
    """Counts what happens, and ends the process at one of them by a signal."""

    def __init__(self, event: str, count: int, number: signal.Signals) -> None:
        self._event, self._left, self._number = event, count, number
        self._active = False

    def __call__(self, event: str) -> None:
        if self._active and event == self._event:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), self._number)

    def watch(self, folder: Path) -> None:
        """Hook everything that is counted."""
        register_optimizer_step_pre_hook(lambda *_: self("optimizer"))
        register_optimizer_step_post_hook(lambda *_: self("optimizer"))
        self._around(Rollouts, "publish", "publish")
        self._around(Letters, "reset", "rollout")
        self._around(Letters, "step", "rollout")
        sys.addaudithook(lambda name, args: self._audit(str(folder / "run"), name, args))
        self._active = True

    def watch_trainer(self, trainer: Any) -> None:
        self._around(trainer.accelerator, "backward", "micro")

    def _around(self, owner: Any, name: str, event: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self(event)
            result = original(*args, **kwargs)
            self(event)
            return result

        counted.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(owner, name, counted)

    def _audit(self, run: str, name: str, args: tuple[Any, ...]) -> None:
        if name in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree") and str(args[0]).startswith(run):
            inside = any(part in str(args[0]) for part in ("checkpoint-", ".saving-", ".replaced-", ".removing-"))
            reads = name == "open" and "checkpoint-" in str(args[0]) and args[1] in ("r", "rb")
            if inside:
                self("load" if reads else "save")


class Vowels(Letters):
    """Pays for another kind of letters."""

    def step(self, message: str) -> StepResult:
        return StepResult("ok", reward=sum(letter in "aeiou" for letter in message) / max(1, len(message)), done=True)


class Sometimes(Letters):
    """Some tasks, of which every seventh is broken for good, so that its groups are dropped."""

    tasks = 0

    @classmethod
    def num_tasks(cls, split: str) -> int:
        return cls.tasks

    def reset(self, task_index: int) -> str:  # type: ignore[override]
        if task_index % 7 == 3:
            raise EnvironmentFailure("this task is broken")
        return super().reset(task_index)


def make(folder: Path, algorithm: str, variant: str, steps: int, **more: Any) -> Any:
    """The trainer of a run."""
    options: dict[str, Any] = {
        "output_dir": str(folder / "run"), "max_steps": steps, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 8, "learning_rate": 0.02, "lr_scheduler_type": "linear", "warmup_steps": 3,
        "logging_steps": 3, "report_to": "none", "save_strategy": "steps", "save_steps": 1, "disable_tqdm": True,
        "use_cpu": True, "deterministic": True, "max_consecutive_failed_groups": 4, "max_episode_retries": 0,
    }  # fmt: skip
    if algorithm == "SDPO":
        options["success_reward_threshold"] = 0.3  # somebody must count as solved
    moving = MOVING[algorithm] if variant == "moving" else {}
    given: dict[str, Any] = {"environment_factory": Letters}
    if variant == "lora":
        given["peft_config"] = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj", "down_proj"])
    if variant == "mixture":
        given["environment_factory"] = {"letters": Letters, "vowels": Vowels}
    given |= {name: more.pop(name) for name in ("environment_factory",) if name in more}
    config = getattr(envgrad, f"{algorithm}Config")(**(options | VARIANTS[variant] | moving | more))
    return getattr(envgrad, f"{algorithm}Trainer")(tiny_llama(), args=config, processing_class=tokenizer_of(), **given)


def life(folder: Path, spec: str) -> None:
    """One life of a run; ``spec`` is JSON: what is trained, and the signal that ends it, at an event."""
    told = json.loads(spec)
    _live(folder, make(folder, told["algorithm"], told["variant"], told["steps"]), told, _Tells())


def epoch(folder: Path, spec: str) -> None:
    """One life of an asynchronous run over ``tasks`` tasks, once each; says which step trained which."""
    told = json.loads(spec)
    Sometimes.tasks = told["tasks"]
    trainer = make(
        folder, "AsyncGRPO", told["variant"], -1, environment_factory=Sometimes, deterministic=False, max_staleness=2,
        num_train_epochs=1, num_generations=2, logging_steps=1, save_steps=2,
    )  # fmt: skip
    _live(folder, trainer, told, _Accounts(trainer))


def _live(folder: Path, trainer: Any, told: dict[str, Any], tells: transformers.TrainerCallback) -> None:
    transformers.utils.logging.disable_progress_bar()
    number = signal.Signals[told.get("signal", "SIGKILL")]
    events = Events(told.get("event", "never"), told.get("count", 1), number)
    events.watch_trainer(trainer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(tells)
    events.watch(folder)
    print("begins", flush=True)
    trainer.train(resume_from_checkpoint=True if list((folder / "run").glob("checkpoint-*")) else None)
    torch.save(flat(trainer.model), folder / "weights.pt")


class _Accounts(transformers.TrainerCallback):
    """Says at each step whose groups it began to train, and which came to nothing before it."""

    def __init__(self, trainer: Any) -> None:
        self._played: list[Any] = []
        original = trainer._record_round
        trainer._record_round = lambda played: (self._played.append(played), original(played))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(json.dumps({"from": state.global_step}), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        told: dict[str, Any] = {"step": state.global_step}
        played = self._played.pop() if self._played else None
        for name in ("groups", "dropped", "filtered", "stale"):
            told[name] = [] if played is None else [group.task.position for group in getattr(played, name)]
        print(json.dumps(told), flush=True)


class _Tells(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"step {state.global_step}", flush=True)
