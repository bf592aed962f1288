"""Programs that train and come to an end, each in its way; ``zygote`` runs them, and the tests look at what is left."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import envgrad
import envgrad.training.trainers
from envgrad.environments.contract import StepResult
from envgrad.training import stream
from helpers.models import Letters, flat, tiny_llama, tokenizer_of


def _trainer(folder: Path, environment: type, algorithm: str = "GRPO", **options: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"), "max_steps": 6, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 8, "learning_rate": 0.05, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "save_strategy": "steps", "save_steps": 100, "disable_tqdm": True, "use_cpu": True,
        "max_consecutive_failed_groups": 2, "max_episode_retries": 0,
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("reward_funcs", "callbacks") if name in options}
    return getattr(envgrad, f"{algorithm}Trainer")(
        tiny_llama(), args=getattr(envgrad, f"{algorithm}Config")(**(settings | options)),
        processing_class=tokenizer_of(), environment_factory=environment, **given,
    )  # fmt: skip


class Closing(Letters):
    """Says when it is closed, slowly if asked to."""

    slow = 0.0

    def close(self) -> None:
        time.sleep(self.slow)
        print("closed")


# -- errors


def environment_fails(folder: Path, algorithm: str) -> None:
    class Fails(Closing):
        resets = 0

        def reset(self, seed: int) -> str:
            Fails.resets += 1
            if Fails.resets > 8:
                raise OSError("the simulator burnt down")
            return super().reset(seed)

    _trainer(folder, Fails, algorithm).train()


def reward_fails(folder: Path, algorithm: str) -> None:
    calls = []

    def judge(completions: list[Any], **kwargs: Any) -> list[float]:
        calls.append(1)
        if len(calls) > 2:
            raise ZeroDivisionError("nobody to judge")
        return [float(len(one[0]["content"]) % 3) for one in completions]

    _trainer(folder, Closing, algorithm, reward_funcs=judge).train()


def sampler_thread_dies(folder: Path, algorithm: str) -> None:
    trainer = _trainer(folder, Closing, algorithm, max_steps=1000)
    forwards = []

    def fail(*_: Any) -> None:
        if threading.current_thread().name == "envgrad-sampler":
            forwards.append(1)
            if len(forwards) > 30:
                raise MemoryError("no more memory for keys")

    trainer.model.get_input_embeddings().register_forward_hook(fail)
    trainer.train()


def tool_hangs(folder: Path) -> None:
    class Hangs(Closing):
        def step(self, message: str) -> StepResult:
            time.sleep(3600)
            raise AssertionError

    _trainer(folder, Hangs, tool_timeout=0.2, close_timeout=0.2).train()


# -- a sampler in a process of its own


def _with_sampler(folder: Path, algorithm: str = "GRPO", **options: Any) -> Any:
    """A trainer that says which process samples, when it does."""

    class Tells(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print(f"step {state.global_step} sampler {trainer.rollouts.sampler.pid}")

    trainer = _trainer(folder, Closing, algorithm, sampler="process", callbacks=[Tells()], **options)
    return trainer


def sampler_process_trains(folder: Path) -> None:
    trainer = _with_sampler(folder, deterministic=True, max_steps=3)
    trainer.train()
    torch.save(flat(trainer.model), folder / "weights.pt")
    end = time.monotonic() + 10
    while time.monotonic() < end and any(one.name.startswith("envgrad") for one in threading.enumerate()):
        time.sleep(0.01)
    print("threads", [one.name for one in threading.enumerate()])


def local_sampler_trains(folder: Path) -> None:
    trainer = _trainer(folder, Closing, deterministic=True, max_steps=3)
    trainer.train()
    torch.save(flat(trainer.model), folder / "weights.pt")


def sampler_process_is_killed(folder: Path, algorithm: str = "GRPO") -> None:
    trainer = _with_sampler(folder, algorithm, max_steps=10_000)
    trainer.train()


def disk_is_full(folder: Path, algorithm: str = "GRPO") -> None:
    class Fills(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))

    trainer = _trainer(
        folder, Closing, algorithm, sampler="process", callbacks=[Fills()], save_strategy="no", log_episodes=False,
        logging_steps=100, max_steps=1000,
    )  # fmt: skip
    trainer.train()


# -- signals


class Waits(Closing):
    """Waits in its ninth reset, so that the trainer waits for it."""

    resets = 0

    def reset(self, seed: int) -> str:
        Waits.resets += 1
        if Waits.resets == 9:
            print("waiting")
            time.sleep(3600)
        return super().reset(seed)


def waits(folder: Path, algorithm: str, save_strategy: str = "steps") -> None:
    _trainer(folder, Waits, algorithm, save_strategy=save_strategy, reset_timeout=60.0).train()


def closes_slowly(folder: Path, algorithm: str = "GRPO") -> None:
    Waits.slow = 3600.0
    trainer = _trainer(folder, Waits, algorithm, reset_timeout=60.0, close_timeout=3600.0)
    trainer.add_callback(_Counts())
    trainer.train()


class _Counts(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"step {state.global_step}")


def evaluates(folder: Path) -> None:
    Waits.resets = 8
    _trainer(folder, Waits, reset_timeout=60.0).evaluate()


def steps_for_ever(folder: Path) -> None:
    """Is interrupted anywhere; the checkpoint must be of a whole step all the same."""
    trainer = _trainer(folder, Closing, max_steps=1_000_000, logging_steps=1_000_000, log_episodes=False)
    trainer.add_callback(_Says())
    trainer.train()


class _Says(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            print("going")


def interrupted(folder: Path, place: str, algorithm: str = "GRPO") -> None:
    """Two steps a round, six in all; SIGINT comes at a place of the fourth, and what was saved is resumed."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4, "steps_per_generation": 2, "deterministic": True,
    }  # fmt: skip
    whole = _trainer(folder / "whole", Letters, algorithm, **options)
    whole.train()
    whole.close()
    trainer = _trainer(folder / "cut", _interrupting(place), algorithm, **options)
    if place == "micro-batch":
        _interrupt_in(trainer.model, "train", call=_first_of_step(trainer, 3))  # right before the first of them
    elif place == "optimizer":
        _interrupt_in(trainer, "_clip_grad_norm", call=_first_of_step(trainer, 3))
    elif place == "credit":
        _interrupt_in(stream, "split_round", call=_first_of_step(trainer, 2))
    try:
        trainer.train()
    except KeyboardInterrupt:
        print("interrupted after", trainer.state.global_step)
    again = _trainer(folder / "cut", Letters, algorithm, **options)
    again.train(resume_from_checkpoint=True)
    print("equal", torch.equal(flat(whole.model), flat(again.model)))


def _interrupting(place: str) -> type:
    class Interrupts(Letters):
        resets = 0

        def reset(self, seed: int) -> str:
            Interrupts.resets += 1
            if place == "rollout" and Interrupts.resets == 11:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            return super().reset(seed)

    Interrupts.__name__ = Letters.__name__  # tasks are drawn by it
    return Interrupts


def _interrupt_in(owner: Any, name: str, call: Any) -> None:
    original, done = getattr(owner, name), []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        if not done and call():
            done.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    setattr(owner, name, interrupt)


def _first_of_step(trainer: Any, step: int) -> Any:
    return lambda: trainer.state.global_step == step
