"""The trainers that users name: a configuration and an algorithm on ``RolloutTrainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.custom import resolve_algorithm
from envgrad.config import GRPOConfig, RLOOConfig, RolloutConfig, SDPOConfig
from envgrad.environments.dataset_tasks import Dataset
from envgrad.errors import ConfigurationError
from envgrad.training.inputs import EnvironmentFactory, RolloutFunction, UserInputs
from envgrad.training.trainer import RolloutTrainer

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


class NamedTrainer(RolloutTrainer):
    """What the trainers below share: their arguments, in ``trl``'s order.

    Args:
        model: A name, a path (a folder or a ``.gguf`` file), ``"starter"``, or a loaded causal language model.
        reward_funcs: Beside or instead of the environment's reward: a function, the name of a reward model, any
            ``nn.Module``, or a list of them.
        args: The configuration; the defaults of ``config_class`` if None.
        train_dataset: Rows that feed ``reset``, or prompts to answer. None: the environment owns the tasks.
        eval_dataset: The same for evaluation, or ``{name: dataset}``.
        processing_class: The tokenizer; loaded from the model's place if None.
        reward_processing_classes: Tokenizers of reward models, one for each of ``reward_funcs``.
        callbacks: ``transformers.TrainerCallback``s, added to the usual ones.
        optimizers: ``(optimizer, scheduler)`` instead of those that ``args`` describes.
        quantization_config: Given to ``from_pretrained``.
        peft_config: Puts adapters on the model; only they are trained.
        tools: Functions that the model may call, beside or without an environment.
        rollout_func: ``rollout_func(prompts, trainer)`` plays whole groups by itself: see ``envgrad.rollout.custom``.
        environment_factory: A zero-argument callable that makes an environment, or ``{name: callable}`` for several.
        algorithm: The user's own credit or loss: see ``envgrad.algorithms.custom``.

    Raises:
        ConfigurationError: anything that cannot work, before the first episode.
    """

    config_class: ClassVar[type[RolloutConfig]]

    def __init__(
        self,
        model: str | Path | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: RolloutConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        tools: Sequence[Callable[..., object]] | None = None,
        rollout_func: RolloutFunction | None = None,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
        algorithm: Algorithm | Callable[..., Any] | None = None,
    ) -> None:
        config = args if args is not None else self.config_class(output_dir=_default_folder(model, self.config_class))
        if not isinstance(config, self.config_class):
            raise ConfigurationError(
                f"args is a {type(config).__name__}; {type(self).__name__} takes a {self.config_class.__name__}"
            )
        super().__init__(
            model,
            config,
            resolve_algorithm(algorithm, config.algorithm()),
            UserInputs(
                environment_factory=environment_factory,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                reward_funcs=reward_funcs,
                reward_processing_classes=reward_processing_classes,
                tools=tools,
                rollout_func=rollout_func,
            ),
            processing_class=processing_class,
            callbacks=callbacks or (),
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )


class GRPOTrainer(NamedTrainer):
    """Group Relative Policy Optimization on environments (https://arxiv.org/abs/2402.03300).

    Arguments are those of ``NamedTrainer``, in the order of ``trl``'s ``GRPOTrainer``.

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

    config_class = GRPOConfig


class RLOOTrainer(NamedTrainer):
    """REINFORCE with a leave-one-out baseline (https://arxiv.org/abs/2402.14740).

    Arguments are those of ``NamedTrainer``, in the order of ``trl``'s ``RLOOTrainer``.
    """

    config_class = RLOOConfig


class SDPOTrainer(NamedTrainer):
    """Self-distillation policy optimization (https://arxiv.org/abs/2601.20802): see ``algorithms.sdpo``.

    Arguments are those of ``NamedTrainer``.
    """

    config_class = SDPOConfig


def _default_folder(model: object, config: type[RolloutConfig]) -> str:
    """As in trl: the model's name and the algorithm's."""
    name = (
        str(model)
        if isinstance(model, (str, Path))
        else str(getattr(getattr(model, "config", None), "_name_or_path", ""))
    )
    return f"{Path(name).name or 'model'}-{config.__name__.removesuffix('Config')}"
