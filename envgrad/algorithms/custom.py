"""A user's own advantages or loss, without forking an algorithm."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from envgrad.algorithms.base import Algorithm, ReferenceLogprobs, TeacherPlan
from envgrad.algorithms.checks import changed
from envgrad.algorithms.credit import group_rewards, is_scored, training_samples
from envgrad.errors import ConfigurationError
from envgrad.logprobs import EntropyMode
from envgrad.losses import LossInputs, LossOutputs, importance_ratio, policy_metrics, weighted_sum
from envgrad.packing import StepTotals
from envgrad.types import Group, TrainingSample

AdvantageFunction: TypeAlias = Callable[[list[list[float | None]]], Sequence[Sequence[float]]]
"""Rewards by group and sibling (None: unscorable) -> advantages of the same shape."""

LossFunction: TypeAlias = Callable[[LossInputs], Tensor | LossOutputs]
"""A micro-batch -> ``(N,)`` losses per trained token; or a scalar; or ``LossOutputs``, with metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """What ``custom`` was given; ``resolve_algorithm`` makes it an algorithm."""

    advantages: AdvantageFunction | None
    loss: LossFunction | None
    base: Algorithm | None
    entropy: EntropyMode | None
    skips_zero_advantages: bool | None


def custom(
    *,
    advantages: AdvantageFunction | None = None,
    loss: LossFunction | None = None,
    base: Algorithm | None = None,
    entropy: EntropyMode | None = None,
    skips_zero_advantages: bool | None = None,
) -> Custom:
    """An algorithm of which some parts are yours: ``GRPOTrainer(..., algorithm=custom(loss=my_loss))``.

    Parts that are not given are the ``base``'s, the configuration's algorithm by default: its weights decide how token
    losses are summed (``loss_type``), its ``beta`` whether there are ``ref_logprobs``. A plain function as
    ``algorithm`` is ``custom(loss=function)``; for state, or another shape, subclass ``Algorithm`` (four methods).

    Args:
        advantages: ``advantages(rewards)`` gets ``[[1.0, None, 0.5], ...]``: a round's rewards by group, None where an
            episode is unscorable; returns finite numbers of the same shape. What it says of a None is not used.
        loss: ``loss(inputs)`` gets ``LossInputs``, all ``(N,)``, of a micro-batch's N trained tokens. It returns
            ``(N,)`` losses, which are weighted and summed here; or a scalar that is this micro-batch's share of the
            step's loss already (weighted by ``inputs.weights``: a mean over a micro-batch would change with the split);
            or ``LossOutputs`` to log metrics too. ``inputs.importance`` and ``inputs.selected``, where they are not
            None, are its own to apply.
        base: Everything else.
        entropy: ``"grad"`` for a loss that differentiates ``inputs.entropy``; the base's mode if None.
        skips_zero_advantages: Whether your loss has no gradient where advantages are 0, so that samples without any
            are not forwarded, and a step that teaches nothing moves nothing. The base's, without a loss of yours;
            else False if None.

    Raises:
        ConfigurationError: neither part is given, or one is no function of one argument.

    Example:
        >>> def reinforce(inputs):
        ...     return -inputs.advantages * inputs.logprobs
        >>> def centred(rewards):
        ...     return [[(r or 0) - sum(x or 0 for x in group) / len(group) for r in group] for group in rewards]
        >>> from envgrad.algorithms.grpo import GRPO
        >>> algorithm = resolve_algorithm(custom(advantages=centred, loss=reinforce), GRPO())
        >>> two = torch.tensor([-1.0, -2.0])
        >>> inputs = LossInputs(logprobs=two, old_logprobs=two, sampler_logprobs=two, advantages=torch.ones(2),
        ...     weights=torch.full((2,), 0.5), sample_index=torch.tensor([0, 1]), num_samples=2, total_tokens=2.0)
        >>> algorithm.loss(inputs).loss.item()
        1.5
    """
    if advantages is None and loss is None:
        raise ConfigurationError("custom() needs advantages= or loss=; pass the base itself if nothing is to change")
    for name, function in (("advantages", advantages), ("loss", loss)):
        if function is not None:
            _check_function(name, function)
    if entropy is not None and loss is None:
        raise ConfigurationError(f"entropy={entropy!r} cannot act: it is for a loss of yours, and none is given")
    return Custom(
        advantages=advantages, loss=loss, base=base, entropy=entropy, skips_zero_advantages=skips_zero_advantages
    )


def resolve_algorithm(algorithm: Algorithm | LossFunction | Custom | None, config_algorithm: Algorithm) -> Algorithm:
    """The algorithm that a trainer uses, given its ``algorithm=`` and the configuration's own.

    Args:
        algorithm: None for the configuration's; an ``Algorithm``; a loss function; or what ``custom`` returns.
        config_algorithm: What the configuration's fields describe.

    Raises:
        ConfigurationError: no algorithm, or a field of the configuration that could not act beside it.
    """
    given: object = algorithm  # whatever the user's script passes
    if given is None:
        return config_algorithm
    if isinstance(given, Custom):
        return _customized(given, config_algorithm)
    if isinstance(given, type):
        raise ConfigurationError(f"algorithm={given.__name__} is a class; pass an instance: {given.__name__}(...)")
    if isinstance(given, Algorithm):
        _refuse(changed(config_algorithm, _fields(config_algorithm)), f"algorithm={type(given).__name__}(...)")
        return given
    if callable(given):
        return _customized(custom(loss=given), config_algorithm)
    missing = sorted(name for name in _MEMBERS if not hasattr(given, name))
    raise ConfigurationError(
        f"algorithm={given!r} is neither a loss function nor an Algorithm, which has {', '.join(missing)} too; pass "
        "loss(inputs), envgrad.custom(...), or an instance of a subclass of envgrad.Algorithm"
    )


_MEMBERS = [name for name in vars(Algorithm) if not name.startswith("_")]


def _customized(parts: Custom, config_algorithm: Algorithm) -> Algorithm:
    base = config_algorithm if parts.base is None else parts.base
    if parts.base is not None:
        _refuse(changed(config_algorithm, _fields(config_algorithm)), f"custom(base={type(base).__name__}(...))")
    if parts.loss is not None:
        _refuse(changed(base, _fields(base), "loss"), f"the loss of {_name(parts.loss)}")
    if parts.advantages is not None:
        _refuse(changed(base, _fields(base), "credit"), f"the advantages of {_name(parts.advantages)}")
    return CustomAlgorithm(base=base, parts=parts)


def _refuse(given: list[str], beside: str) -> None:
    if given:
        raise ConfigurationError(
            f"{', '.join(given)} cannot act beside {beside}, which takes its place; remove it, or set it there"
        )


def _fields(algorithm: Algorithm) -> tuple[Field[Any], ...]:
    """Those that the configuration sets on purpose: the length limit is the episodes' too."""
    owner: object = algorithm
    if not is_dataclass(owner):
        return ()
    return tuple(found for found in fields(owner) if found.name != "max_completion_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomAlgorithm(Algorithm):
    """``base`` with a user's functions in the place of its credit or its loss."""

    base: Algorithm
    parts: Custom

    @property
    def needs_reference(self) -> bool:
        return self.base.needs_reference

    @property
    def credit_reads_reference(self) -> bool:
        return self.parts.advantages is None and self.base.credit_reads_reference

    @property
    def entropy(self) -> EntropyMode:
        if self.parts.loss is None:
            return self.base.entropy
        return self.parts.entropy or "metric"

    @property
    def skips_zero_advantages(self) -> bool:
        if self.parts.skips_zero_advantages is not None:
            return self.parts.skips_zero_advantages
        return self.parts.loss is None and self.base.skips_zero_advantages

    @property
    def top_entropy_quantile(self) -> float:
        return self.base.top_entropy_quantile

    @property
    def teacher(self) -> TeacherPlan | None:
        return self.base.teacher

    def credit(self, groups: Sequence[Group], reference: ReferenceLogprobs | None = None) -> list[TrainingSample]:
        if self.parts.advantages is None:
            return self.base.credit(groups, reference)
        rewards = group_rewards(groups)
        returned = self.parts.advantages([list(of_group) for of_group in rewards])
        advantages = _checked_advantages(returned, rewards, _name(self.parts.advantages))
        return [
            sample
            for group, of_group in zip(groups, advantages, strict=True)
            for episode, advantage in zip(group.episodes, of_group, strict=True)
            if is_scored(episode)
            for sample in training_samples(episode, advantage)
        ]

    def totals(self, samples: Sequence[TrainingSample]) -> StepTotals:
        return self.base.totals(samples)

    def weights(self, samples: Sequence[TrainingSample], totals: StepTotals | None = None) -> list[float]:
        return self.base.weights(samples, totals)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        if self.parts.loss is None:
            return self.base.loss(inputs)
        returned = self.parts.loss(inputs)
        metrics = policy_metrics(importance_ratio(inputs, "token").detach(), inputs)
        if isinstance(returned, LossOutputs):
            loss, metrics = returned.loss, metrics | dict(returned.metrics)
            _check_loss(loss, inputs, _name(self.parts.loss), shapes=[()])
        else:
            _check_loss(returned, inputs, _name(self.parts.loss), shapes=[(), tuple(inputs.logprobs.shape)])
            loss = weighted_sum(returned, inputs) if returned.dim() else returned
        return LossOutputs(loss=loss, metrics=metrics)

    def with_reward_weights(self, weights: Mapping[str, float]) -> Algorithm:
        return CustomAlgorithm(base=self.base.with_reward_weights(weights), parts=self.parts)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.base.after_step(metrics)

    def state_dict(self) -> dict[str, float]:
        return self.base.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.base.load_state_dict(state)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _check_function(part: Literal["advantages", "loss"] | str, function: object) -> None:
    if not callable(function):
        raise ConfigurationError(f"{part}={function!r} must be a function of one argument")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # a builtin that has none
    try:
        signature.bind(None)
    except TypeError as error:
        argument = "rewards" if part == "advantages" else "inputs"
        raise ConfigurationError(
            f"{_name(function)}{signature} cannot be the {part}: it is called with one argument, "
            f"{_name(function)}({argument})"
        ) from error


def _checked_advantages(returned: Any, rewards: list[list[float | None]], name: str) -> list[list[float]]:
    wanted = [len(of_group) for of_group in rewards]
    try:
        found = [[float(value) for value in of_group] for of_group in returned]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name} returned {type(returned).__name__} {str(returned)[:80]}, which is no list of lists of numbers; "
            f"return one advantage for each reward of {len(wanted)} groups"
        ) from error
    if [len(of_group) for of_group in found] != wanted:
        raise ConfigurationError(
            f"{name} returned groups of {[len(of_group) for of_group in found]} advantages for groups of {wanted} "
            "rewards; return one for each, unscorable ones included"
        )
    for number, (values, of_group) in enumerate(zip(found, rewards, strict=True)):
        for sibling, (value, reward) in enumerate(zip(values, of_group, strict=True)):
            if reward is not None and not math.isfinite(value):
                raise ConfigurationError(
                    f"{name} returned {value} for sibling {sibling} of group {number}, whose reward is {reward}; "
                    "advantages must be finite"
                )
    return found


def _check_loss(loss: object, inputs: LossInputs, name: str, shapes: list[tuple[int, ...]]) -> None:
    wanted = " or ".join(str(shape) if shape else "a scalar" for shape in reversed(shapes))
    if not isinstance(loss, Tensor):
        raise ConfigurationError(f"{name} returned {type(loss).__name__}; return a tensor: {wanted}")
    if tuple(loss.shape) not in shapes:
        raise ConfigurationError(f"{name} returned a tensor of shape {tuple(loss.shape)}; return {wanted}")
    if inputs.logprobs.requires_grad and not loss.requires_grad:
        raise ConfigurationError(f"{name} returned a loss without gradient; compute it from inputs.logprobs")
    if not bool(torch.isfinite(loss).all()):
        raise ConfigurationError(f"{name} returned a loss that is not finite; look for log(0) or exp of a large number")
