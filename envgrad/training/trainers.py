"""The trainers that users name: a configuration and an algorithm on ``RolloutTrainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from envgrad.config import GRPOConfig
from envgrad.training.rollouts import EnvironmentFactory
from envgrad.training.trainer import RolloutTrainer


class GRPOTrainer(RolloutTrainer):
    """Group Relative Policy Optimization on environments (https://arxiv.org/abs/2402.03300).

    Args:
        model: A name, a path (a folder or a ``.gguf`` file), ``"starter"``, or a loaded causal language model.
        args: The configuration; ``GRPOConfig()`` if None, which needs an environment of finite size.
        environment_factory: A zero-argument callable that makes an environment, or ``{name: callable}`` for a mixture.
        processing_class: The tokenizer; loaded from the model's place if None.
        callbacks: ``transformers.TrainerCallback``s, added to the usual ones.
        optimizers: ``(optimizer, scheduler)`` instead of those that ``args`` describes.
        peft_config: Puts adapters on the model; only they are trained.

    Raises:
        ConfigurationError: anything that cannot work, before the first episode.

    Example:
        >>> import tempfile
        >>> class Echo:
        ...     def reset(self, seed): return "Say something."
        ...     def say(self, text: str) -> str:
        ...         "Say it."
        ...         self.text = text
        ...         return text
        ...     def get_reward(self): return 1.0
        >>> config = GRPOConfig(output_dir=tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=4,
        ...     num_generations=2, max_completion_length=16, disable_tqdm=True, report_to="none", save_strategy="no")
        >>> trainer = GRPOTrainer("starter", args=config, environment_factory=Echo)
        >>> trainer.train().global_step  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        1
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        args: GRPOConfig | None = None,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        peft_config: Any = None,
    ) -> None:
        config = args if args is not None else GRPOConfig()
        super().__init__(
            model,
            config,
            config.algorithm(),
            environment_factory=environment_factory,
            processing_class=processing_class,
            callbacks=callbacks or (),
            optimizers=optimizers,
            peft_config=peft_config,
        )
