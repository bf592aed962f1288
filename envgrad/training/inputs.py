"""What a user gives beside model and configuration: environments, datasets, rewards, tools; checked before all else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from envgrad.environments.dataset_tasks import ColumnDataset, Dataset, MapDataset
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer

EnvironmentFactory: TypeAlias = Callable[[], object]

RolloutFunction: TypeAlias = Callable[[list[Any], "RolloutTrainer"], Mapping[str, Any]]
"""``rollout_func(prompts, trainer)``: see ``envgrad.rollout.custom``."""

IMAGES = ("images", "image")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserInputs:
    """Where tasks come from, who plays them, and who scores them.

    Raises:
        ConfigurationError: nothing to learn from, options that exclude each other, or a dataset of no known kind.
    """

    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None
    train_dataset: Dataset | None = None
    eval_dataset: Dataset | Mapping[str, Dataset] | None = None
    reward_funcs: Any = None
    """one or a list of functions, model names, or modules"""
    reward_processing_classes: Any = None
    tools: Sequence[Callable[..., object]] | None = None
    rollout_func: RolloutFunction | None = None

    def __post_init__(self) -> None:
        if self.environment_factory is None and self.train_dataset is None:
            raise ConfigurationError(
                "nothing to learn from: pass environment_factory=YourEnvironment, a class with reset() and "
                "get_reward(), or train_dataset= with a 'prompt' column and reward_funcs="
            )
        if isinstance(self.environment_factory, Mapping) and not self.environment_factory:
            raise ConfigurationError("environment_factory={} names no environment; give {name: class}")
        if self.rollout_func is not None:
            self._check_rollout_func(self.rollout_func)
        if self.environment_factory is None and not _given(self.reward_funcs):
            raise ConfigurationError(
                "no reward: pass reward_funcs=, or an environment_factory whose environment defines get_reward()"
            )
        for name, dataset in self.datasets():
            _check_dataset(name, dataset)

    def _check_rollout_func(self, function: object) -> None:
        if not callable(function):
            raise ConfigurationError(f"rollout_func={function!r} must be a function of (prompts, trainer)")
        for name, given in (("environment_factory", self.environment_factory), ("tools", self.tools)):
            if given:
                raise ConfigurationError(
                    f"rollout_func plays whole episodes by itself, so {name} cannot act; use one or the other"
                )

    def datasets(self) -> Iterable[tuple[str, Dataset]]:
        """Every dataset given, by the name of its argument."""
        if self.train_dataset is not None:
            yield "train_dataset", self.train_dataset
        if isinstance(self.eval_dataset, Mapping):
            for name, dataset in self.eval_dataset.items():
                yield f"eval_dataset[{name!r}]", dataset
        elif self.eval_dataset is not None:
            yield "eval_dataset", self.eval_dataset

    def columns(self) -> frozenset[str] | None:
        """The training rows' columns; empty without a dataset, None if they are not known before the first row."""
        return frozenset() if self.train_dataset is None else columns_of(self.train_dataset)


def columns_of(dataset: Dataset) -> frozenset[str] | None:
    """The columns that ``dataset`` names, or that its first row has; None if only streaming would tell."""
    names = dataset.column_names if isinstance(dataset, ColumnDataset) else None
    if names is not None:
        return frozenset(names)
    if isinstance(dataset, MapDataset) and len(dataset) and isinstance(dataset[0], Mapping):
        return frozenset(dataset[0])
    return None


def _given(rewards: object) -> bool:
    return rewards is not None and not (isinstance(rewards, Sequence) and not isinstance(rewards, str) and not rewards)


def _check_dataset(name: str, dataset: Dataset) -> None:
    if isinstance(dataset, (Mapping, str, bytes)) or not isinstance(dataset, (MapDataset, Iterable)):
        raise ConfigurationError(
            f"{name} is a {type(dataset).__name__}; it must be a dataset or an iterable of rows (of a dict of splits, "
            "give one split)"
        )
    for column in sorted(set(IMAGES) & (columns_of(dataset) or frozenset())):
        raise ConfigurationError(
            f"{name} has a column {column!r}: episodes are text only. Drop the column, or describe images in words"
        )
