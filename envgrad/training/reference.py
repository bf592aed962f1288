"""``sync_ref_model``: a reference that follows the policy slowly (TR-DPO, https://arxiv.org/abs/2404.09656)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from envgrad.config import RolloutConfig
from envgrad.errors import ConfigurationError
from envgrad.training.model import Reference

REFERENCE_NAME = "reference"
"""stem of the file in a checkpoint that holds a mixed reference"""


@dataclass(slots=True, eq=False)
class SyncReference(TrainerCallback):
    """Every ``every`` steps, ``reference = alpha * policy + (1 - alpha) * reference``."""

    reference: Reference
    alpha: float
    every: int

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.reference.mix(self.alpha)

    def load(self, checkpoint: str | Path) -> None:
        """Go on with the reference that ``checkpoint`` holds.

        Raises:
            ConfigurationError: it holds none: the run that wrote it did not mix its reference.
        """
        from safetensors.torch import load_file

        path = Path(checkpoint) / f"{REFERENCE_NAME}.safetensors"
        if not path.exists():
            raise ConfigurationError(
                f"sync_ref_model=True, but {path} is missing: the checkpoint was written without it; set it to False"
            )
        self.reference.load_weights(load_file(path))


def sync_reference(config: RolloutConfig, reference: Reference | None) -> SyncReference | None:
    """The callback that ``config`` asks for.

    Raises:
        ConfigurationError: nothing reads a reference, or it is the policy with its adapters off.
    """
    if not config.sync_ref_model:
        return None
    if reference is None:
        raise ConfigurationError("sync_ref_model=True, but nothing reads a reference: set beta above 0")
    if not reference.is_copy:
        raise ConfigurationError(
            "sync_ref_model=True, but the model has adapters and its reference is the base model, which does not move; "
            "set it to False, or train without peft_config"
        )
    return SyncReference(reference, config.ref_model_mixup_alpha, config.ref_model_sync_steps)
