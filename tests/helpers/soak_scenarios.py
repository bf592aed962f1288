"""Long runs that say as they go what they hold: memory, file descriptors, threads."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import transformers

import envgrad
import envgrad.training.trainers  # so that a scenario need not import it
from envgrad.starter.compass import Compass
from helpers.models import Letters, tiny_llama, tokenizer_of


def held() -> dict[str, float]:
    """What this process holds now; megabytes, counts, and the seconds of CPU that it has used."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((thread / "comm").read_text().strip())
    return {
        "rss": int(status["VmRSS"].split()[0]) / 1024,
        "threads": sum(name != "jemalloc_bg_thd" for name in names),  # pyarrow's allocator starts it when it likes
        "files": len(os.listdir("/proc/self/fd")),
        "cpu": time.process_time(),
    }


class Watch(transformers.TrainerCallback):
    """Prints what is held, every so many steps."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every == 0:
            gc.collect()  # garbage that waits for its turn is nothing that grows
            print(json.dumps({"step": state.global_step} | held()), flush=True)


def soak(folder: Path, algorithm: str, model: str, steps: str, options: str = "{}") -> None:
    """Train and tell."""
    transformers.utils.logging.disable_progress_bar()
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"), "max_steps": int(steps), "per_device_train_batch_size": 4,
        "num_generations": 4, "max_completion_length": 4, "learning_rate": 1e-3, "logging_steps": 20,
        "report_to": "none", "save_strategy": "steps", "save_steps": 100, "save_total_limit": 2,
        "disable_tqdm": True, "use_cpu": True, "eval_tasks": 2,
    }  # fmt: skip
    config = getattr(envgrad, f"{algorithm}Config")(**(settings | json.loads(options)))
    given: dict[str, Any] = {"environment_factory": Letters, "processing_class": tokenizer_of()}
    if model == "starter":
        given = {"environment_factory": Compass}
    trainer = getattr(envgrad, f"{algorithm}Trainer")(
        "starter" if model == "starter" else tiny_llama(), args=config, **given
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Watch(max(1, int(steps) // 20)))
    trainer.train()


def many(folder: Path, algorithm: str, runs: str, steps: str = "3", collect: str = "yes") -> None:
    """One trainer behind another in one process, each forgotten; what is held after each."""
    transformers.utils.logging.disable_progress_bar()
    for number in range(int(runs)):
        config = getattr(envgrad, f"{algorithm}Config")(
            output_dir=str(folder / f"run{number}"), max_steps=int(steps), per_device_train_batch_size=4,
            num_generations=4, max_completion_length=8, report_to="none", save_strategy="no", disable_tqdm=True,
            use_cpu=True, logging_steps=1,
        )  # fmt: skip
        trainer = getattr(envgrad, f"{algorithm}Trainer")(
            tiny_llama(), args=config, processing_class=tokenizer_of(), environment_factory=Letters
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        trainer.close()
        del trainer, config
        if collect == "yes":
            gc.collect()
        print(json.dumps({"run": number} | held()), flush=True)
