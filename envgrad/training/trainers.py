"""The trainers that users name: a configuration and an algorithm on ``RolloutTrainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from envgrad.algorithms.base import Algorithm
from envgrad.algorithms.custom import resolve_algorithm
from envgrad.config import AsyncGRPOConfig, GRPOConfig, RLOOConfig, RolloutConfig, SDPOConfig
from envgrad.config.async_grpo import configuration_of
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
        self._check_config(config)
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

    @classmethod
    def _check_config(cls, config: RolloutConfig) -> None:
        if not isinstance(config, cls.config_class):
            raise ConfigurationError(
                f"args is a {type(config).__name__}; {cls.__name__} takes a {cls.config_class.__name__}"
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


class AsyncGRPOTrainer(NamedTrainer):
    """A trainer whose rollouts never wait for training: see ``docs/async.md``. GRPO, or another ``algorithm``.

    Arguments are those of ``NamedTrainer``, in the order of ``trl``'s ``AsyncGRPOTrainer``; what trl's has not comes
    behind, by name. ``GRPOTrainer`` and its kin train in the same way with ``asynchronous=True`` in their
    configuration.

    Args:
        model: As in ``NamedTrainer``.
        reward_funcs: As in ``NamedTrainer``.
        args: ``AsyncGRPOConfig``, or the configuration of another algorithm with ``asynchronous=True``.
        train_dataset: As in ``NamedTrainer``.
        processing_class: As in ``NamedTrainer``.
        callbacks: As in ``NamedTrainer``.
        optimizers: As in ``NamedTrainer``.
        peft_config: As in ``NamedTrainer``.
        tools: As in ``NamedTrainer``.
        environment_factory: As in ``NamedTrainer``.
        rollout_worker: Not supported: give ``sampler`` in the configuration, or a ``rollout_func``.
        weight_transfer: Not supported: the sampler takes the weights.
        algorithm: ``"grpo"``, ``"rloo"``, ``"sdpo"`` with an ``AsyncGRPOConfig``, or the user's own credit or loss.
        given: ``eval_dataset``, ``reward_processing_classes``, ``quantization_config``, ``rollout_func``.

    Raises:
        ConfigurationError: anything that cannot work, before the first episode.
    """

    config_class = AsyncGRPOConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: RolloutConfig | None = None,
        train_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        peft_config: PeftConfig | None = None,
        tools: Sequence[Callable[..., object]] | None = None,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
        rollout_worker: None = None,
        weight_transfer: None = None,
        *,
        algorithm: str | Algorithm | Callable[..., Any] | None = None,
        **given: Any,
    ) -> None:
        for name, value, instead in (
            ("rollout_worker", rollout_worker, "choose who samples with `sampler` in args, or pass a rollout_func"),
            ("weight_transfer", weight_transfer, "the sampler of args.sampler takes the weights; remove it"),
        ):
            if value is not None:
                raise ConfigurationError(f"{name}={value!r} cannot act in envgrad: {instead}")
        config = args or self.config_class(output_dir=_default_folder(model, self.config_class))
        if isinstance(algorithm, str):
            config, algorithm = _for_algorithm(config, algorithm), None
        super().__init__(
            model, reward_funcs, config, train_dataset,
            processing_class=processing_class, callbacks=callbacks, optimizers=optimizers, peft_config=peft_config,
            tools=tools, environment_factory=environment_factory, algorithm=algorithm, **given,
        )  # fmt: skip

    @classmethod
    def _check_config(cls, config: RolloutConfig) -> None:
        if not config.asynchronous:
            raise ConfigurationError(
                f"args is a {type(config).__name__} with asynchronous=False; {cls.__name__} takes an AsyncGRPOConfig, "
                "or another configuration with asynchronous=True"
            )


def _for_algorithm(config: RolloutConfig, name: str) -> RolloutConfig:
    if isinstance(config, AsyncGRPOConfig):
        return configuration_of(config, name)
    own = type(config).__name__.removesuffix("Config").lower()
    if own != name:
        raise ConfigurationError(f"algorithm={name!r}, and args is a {type(config).__name__}; give one or the other")
    return config


def _default_folder(model: object, config: type[RolloutConfig]) -> str:
    """As in trl: the model's name and the algorithm's."""
    name = (
        str(model)
        if isinstance(model, (str, Path))
        else str(getattr(getattr(model, "config", None), "_name_or_path", ""))
    )
    return f"{Path(name).name or 'model'}-{config.__name__.removesuffix('Config')}"
