"""Checkpoints that are whole or not there: written to a temporary folder, synced, renamed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from envgrad.training.stream import StepItem

PROGRESS_NAME = "rollout_state.json"
PENDING_NAME = "rollout_steps.pt"
_SAVING = ".saving"


class AtomicCheckpoints(Trainer):
    """``Trainer`` whose checkpoints appear by a rename, and carry the rollouts' position (``progress_state``)."""

    _saving_in: Path | None = None

    def progress_state(self) -> dict[str, Any]:
        """What the rollouts need to go on: plain JSON data."""
        return {}

    def pending_steps(self) -> list[StepItem]:
        """Optimizer steps that were played for and not made yet."""
        return []

    def create_model_card(self, *args: Any, dataset_name: str | None = None, **kwargs: Any) -> None:
        """``Trainer.create_model_card``; ``dataset_name`` is what trl calls ``dataset``."""
        if dataset_name is not None:
            kwargs["dataset"] = dataset_name
        super().create_model_card(*args, **kwargs)

    def extra_weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights beside the policy's that training goes on with: ``{stem of the file: weights by name}``."""
        return {}

    def _get_output_dir(self, trial: Any) -> str:
        if self._saving_in is not None:
            return str(self._saving_in)
        return str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(super()._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.state.best_global_step and self.args.should_save:
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best.exists() or best.name == name:
                self.state.best_model_checkpoint = str(best)
        staging = run_dir / f"{_SAVING}-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self._saving_in = staging
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_in = None
        if not self.args.should_save:
            return
        final = run_dir / name
        if self.state.best_model_checkpoint == str(staging / name):  # it is found where it will lie
            self.state.best_model_checkpoint = str(final)
            self.state.save_to_json(str(staging / name / TRAINER_STATE_NAME))
        (staging / name / PROGRESS_NAME).write_text(json.dumps(self.progress_state()), encoding="utf-8")
        if steps := self.pending_steps():
            torch.save(steps, staging / name / PENDING_NAME)
        for stem, weights in self.extra_weights().items():
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in weights.items()}
            save_file(tensors, staging / name / f"{stem}.safetensors")
        _sync_tree(staging / name)
        if final.exists():
            shutil.rmtree(final)
        os.replace(staging / name, final)
        _sync(run_dir)
        shutil.rmtree(staging)
        rotate_checkpoints(
            output_dir=str(run_dir),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )


def load_progress(checkpoint: str | Path) -> dict[str, Any]:
    """The rollouts' position in ``checkpoint``.

    Raises:
        FileNotFoundError: the checkpoint was not written by envgrad.
    """
    path = Path(checkpoint) / PROGRESS_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the tasks' position is not known, so this run cannot be resumed")
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state


def load_pending(checkpoint: str | Path) -> list[StepItem]:
    """The steps left of the round that ``checkpoint`` was saved in. Unpickles: load only checkpoints that you trust."""
    path = Path(checkpoint) / PENDING_NAME
    if not path.exists():
        return []
    steps: list[StepItem] = torch.load(path, map_location="cpu", weights_only=False)
    return steps


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
