"""From ``reward_funcs``, ``reward_processing_classes`` and ``reward_weights`` to sources with names and weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from envgrad.errors import ConfigurationError
from envgrad.rewards.accuracy import needs_math
from envgrad.rewards.functions import RewardFunction, nearest, no_state
from envgrad.rewards.math_answers import require_math
from envgrad.rollout.scoring import RewardSource, RewardWeights

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from envgrad.rewards.models import RewardModelOptions

    RewardItem: TypeAlias = str | Path | nn.Module | Callable[..., object]
    RewardItems: TypeAlias = RewardItem | Sequence[RewardItem] | None
    Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None

ENVIRONMENT_COMPONENTS = ("turns", "group")
"""Components of an environment's reward that the rollout names itself."""


def build_reward_sources(
    reward_funcs: RewardItems,
    *,
    reward_processing_classes: Tokenizers = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    trainer_state: Callable[[], object] = no_state,
    columns: frozenset[str] | None = frozenset(),
    environment_names: Collection[str] = (),
    has_tools: bool = False,
    model_options: RewardModelOptions | None = None,
) -> tuple[tuple[RewardSource, ...], RewardWeights]:
    """Sources of rewards in the order of ``reward_funcs``, and the weights by name. Nothing that is given is changed.

    A function is called by its ``__name__``, a reward model by the last part of its path, or by its class. A second
    one of a name gets ``_2``, a third ``_3``.

    Args:
        reward_funcs: one, or a list of them: a function (sync or async), a reward model's name or path, a transformers
            model, or any module; None: there are none.
        reward_processing_classes: the reward models' tokenizers, at their places, None at the others.
        reward_weights: a list with one weight per item of ``reward_funcs``, or a mapping by name, which also reaches
            environments and the components of their rewards. 1 where none is given.
        trainer_state: called for the functions' ``trainer_state``.
        columns: the dataset's columns; empty without a dataset, None where they are not known beforehand.
        environment_names: the environments' names; empty without environments.
        has_tools: whether the model has tools; see ``exchange_of``.
        model_options: how reward models are loaded and run (its ``has_tools`` is set to this one).

    Raises:
        ConfigurationError: something that is no reward function or model, a name that an environment has, wrong
            numbers of weights or tokenizers, a weight that is no finite number or names nothing; and what
            ``RewardFunction`` and ``load_reward_model`` raise.

    Example:
        >>> def short(completions, **kwargs):
        ...     return [1.0 / len(text) for text in completions]
        >>> sources, weights = build_reward_sources([short, short], reward_weights=[1.0, 0.5])
        >>> [source.name for source in sources], weights.of("short_2")
        (['short', 'short_2'], 0.5)
    """
    items = _items(reward_funcs)
    tokenizers = _tokenizers(reward_processing_classes, items)
    names = _names(items, environment_names)
    weights = _weights(reward_weights, names, environment_names)
    sources: list[RewardSource] = []
    for item, name, tokenizer in zip(items, names, tokenizers, strict=True):
        if _is_model(item):
            sources.append(_model(item, name, tokenizer, has_tools, model_options))
            continue
        if not callable(item):
            raise AssertionError(item)
        if needs_math(item):
            require_math(name)
        sources.append(
            RewardFunction(
                item,
                name,
                trainer_state,
                columns=columns,
                has_environments=bool(environment_names),
                has_tools=has_tools,
            )
        )
    return tuple(sources), weights


def _items(reward_funcs: RewardItems) -> tuple[RewardItem, ...]:
    if reward_funcs is None:
        return ()
    items = tuple(reward_funcs) if isinstance(reward_funcs, list | tuple) else (reward_funcs,)
    for index, item in enumerate(items):
        if isinstance(item, type):
            raise ConfigurationError(
                f"reward_funcs[{index}] is the class {item.__name__}; pass an instance with __call__, or a function"
            )
        if not (_is_model(item) or callable(item)):
            raise ConfigurationError(
                f"reward_funcs[{index}] is {item!r} ({type(item).__name__}); it must be a function, a reward model's "
                "name or path, or a module"
            )
    return items


def _is_module(item: object) -> bool:
    torch = sys.modules.get("torch")  # who has a module has imported torch
    return torch is not None and isinstance(item, torch.nn.Module)


def _is_model(item: object) -> bool:
    return isinstance(item, str | Path) or _is_module(item)


def _model(
    item: object,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    has_tools: bool,
    options: RewardModelOptions | None,
) -> RewardSource:
    from torch import nn

    from envgrad.rewards.models import RewardModelOptions, load_reward_model

    if not isinstance(item, str | Path | nn.Module):
        raise AssertionError(item)
    return load_reward_model(item, name, tokenizer, replace(options or RewardModelOptions(), has_tools=has_tools))


def _tokenizers(given: Tokenizers, items: Sequence[object]) -> Sequence[PreTrainedTokenizerBase | None]:
    if given is None:
        return [None] * len(items)
    tokenizers = list(given) if isinstance(given, list | tuple) else [given]
    if len(tokenizers) != len(items):
        raise ConfigurationError(
            f"reward_processing_classes has {len(tokenizers)} entries and reward_funcs has {len(items)}; give one for "
            "each, and None at the place of a function"
        )
    for index, (tokenizer, item) in enumerate(zip(tokenizers, items, strict=True)):
        if tokenizer is not None and not _is_model(item):
            raise ConfigurationError(
                f"reward_processing_classes[{index}] cannot act: reward_funcs[{index}] is a function and no reward "
                "model; give None at its place"
            )
    return tokenizers


def _names(items: Sequence[object], environment_names: Collection[str]) -> list[str]:
    names: list[str] = []
    for item in items:
        name = base = _name_of(item)
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    taken = {*environment_names, *(ENVIRONMENT_COMPONENTS if environment_names else ())}
    for index, name in enumerate(names):
        if name in taken:
            owner = "an environment" if name in environment_names else "a part of the environments' rewards"
            raise ConfigurationError(
                f"reward_funcs[{index}] is called {name!r}, as {owner} is, so their rewards could not be told apart; "
                "rename the function (its __name__), or name the environment: environment_factory={'other_name': ...}"
            )
    return names


def _name_of(item: object) -> str:
    if _is_model(item):
        from envgrad.rewards.models import source_of

        return Path(source_of(item)).name or type(item).__name__  # type: ignore[arg-type]
    while isinstance(item, partial):
        item = item.func
    return str(getattr(item, "__name__", type(item).__name__))


def _weights(given: object, names: Sequence[str], environment_names: Collection[str]) -> RewardWeights:
    if given is None:
        return RewardWeights()
    if isinstance(given, Mapping):
        # An environment may name components of its reward that are first seen in an episode.
        unknown = [name for name in given if name not in names]
        if unknown and not environment_names:
            raise ConfigurationError(
                f"reward_weights names {unknown[0]!r}, which is no reward function{nearest(str(unknown[0]), names)}; "
                f"there are {', '.join(names) or 'none'}"
            )
        return RewardWeights(dict(given))
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigurationError(
            f"reward_weights={given!r} must be a list with one weight per reward function, or a mapping by name"
        )
    if len(given) != len(names):
        raise ConfigurationError(
            f"reward_weights has {len(given)} weights and reward_funcs has {len(names)} functions; give one for "
            "each, or a mapping by name, which also reaches environments"
        )
    return RewardWeights(dict(zip(names, given, strict=True)))
