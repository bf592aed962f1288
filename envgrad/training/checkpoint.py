"""Checkpoints that are whole or not there: written to a temporary folder, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, sort_checkpoints

from envgrad.distributed.ranks import Alone, Ranks
from envgrad.training.saved import RolloutState, write_state

_SAVING, _REMOVING, _REPLACED = ".saving", ".removing", ".replaced"
LEFTOVERS = (_SAVING, _REMOVING, _REPLACED)
"""beginnings of folders that are no checkpoints"""


class AtomicCheckpoints(Trainer):
    """``Trainer`` whose checkpoints appear by a rename, and carry the rollouts' state (``rollout_state``).

    ::

        .saving-12/checkpoint-12    being written; of no use to anybody
        checkpoint-12               whole, and on the disk
        .replaced-12                whole, while another takes its place
        .removing-12                being deleted: replaced, or beyond ``save_total_limit``

    A process that is killed at any moment leaves whole checkpoints; what else it leaves, the next save deletes. Of
    several processes all take part, and one makes the checkpoint appear when all have written their files.
    """

    ranks: Ranks = Alone()
    _saving_in: Path | None = None

    def rollout_state(self) -> RolloutState:
        """What the rollouts need to go on.

        Raises:
            NotImplementedError: a subclass has not said it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its checkpoints hold of the rollouts")

    def extra_weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights beside the policy's that training goes on with: ``{stem of the file: weights by name}``."""
        return {}

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        if self.ranks.size == 1:  # several would look for it while it comes back; the next save sees to it there
            _bring_back(Path(super()._get_output_dir(None)))
        return super().train(*args, **kwargs)

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
            remove_leftovers(run_dir)
        self._wait_for_all()  # nobody writes yet into what is deleted
        self._saving_in = staging
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_in = None
        rollouts = self.rollout_state()
        self._wait_for_all()  # all have written
        if self.args.should_save:
            self._publish_checkpoint(staging, name, run_dir, rollouts)
        self._wait_for_all()  # it is there
        if not self.args.should_save and self.state.best_global_step:
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            self.state.best_model_checkpoint = str(best) if best.exists() else None

    def _wait_for_all(self) -> None:
        if self.ranks.size > 1:
            self.ranks.exchange(b"")

    def _publish_checkpoint(self, staging: Path, name: str, run_dir: Path, rollouts: RolloutState) -> None:
        if self.state.best_model_checkpoint == str(staging / name):  # it is found where it will lie
            self.state.best_model_checkpoint = str(run_dir / name)
            self.state.save_to_json(str(staging / name / TRAINER_STATE_NAME))
        write_state(rollouts, staging / name)
        for stem, weights in self.extra_weights().items():
            save_file(_on_cpu(weights), staging / name / f"{stem}.safetensors")
        _sync_tree(staging / name)
        _put(staging / name, run_dir / name)
        staging.rmdir()
        self._rotate(run_dir)

    def _rotate(self, run_dir: Path) -> None:
        """Delete the oldest beyond ``save_total_limit``; the newest and the best stay."""
        limit = self.args.save_total_limit
        if limit is None or limit < 1:
            return
        found = sort_checkpoints(str(run_dir), use_mtime=True)
        kept = {Path(path) for path in (found[-1], self.state.best_model_checkpoint) if path is not None}
        spare = [Path(path) for path in found if Path(path) not in kept]
        for path in spare[: max(0, len(found) - max(limit, len(kept)))]:
            _remove(path)


def remove_leftovers(run_dir: Path) -> None:
    """Delete what a killed process left half written or half deleted; what was to be replaced, and was not, comes back.

    A run's folder has one process at a time.
    """
    _bring_back(run_dir)
    for prefix in LEFTOVERS:
        for path in run_dir.glob(f"{prefix}-*"):
            shutil.rmtree(path, ignore_errors=True)


def _bring_back(run_dir: Path) -> None:
    """A checkpoint that was to be replaced, where its successor never appeared."""
    for old in run_dir.glob(f"{_REPLACED}-*"):
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{old.name.rpartition('-')[2]}"
        if not final.exists():
            os.replace(old, final)


def _on_cpu(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def _put(new: Path, final: Path) -> None:
    """``new`` appears as ``final``; what was there is deleted only then."""
    old = final.parent / f"{_REPLACED}-{final.name.rpartition('-')[2]}"
    if final.exists():
        os.replace(final, old)
    os.replace(new, final)
    _sync(final.parent)
    if old.exists():
        _remove(old)


def _remove(checkpoint: Path) -> None:
    """First under another name, so that no half of it is ever taken for a checkpoint."""
    gone = checkpoint.parent / f"{_REMOVING}-{checkpoint.name.rpartition('-')[2]}"
    os.replace(checkpoint, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
