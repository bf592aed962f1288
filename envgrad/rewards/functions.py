"""Reward functions: any callable from completions to one reward each."""

from __future__ import annotations

import difflib
import inspect
import math
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import SupportsFloat

from envgrad.environments.boundary import call_user
from envgrad.environments.spec import copied
from envgrad.errors import ConfigurationError
from envgrad.rewards.exchange import exchange_of
from envgrad.rewards.results import read_rewards, value_of
from envgrad.rollout.scoring import RewardBatch, RewardLog

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""What every function is given, beside the columns of the dataset."""

NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that are not passed on: what was used and sampled is passed instead."""


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the nearest known name, or nothing.

    Example:
        >>> nearest("lenght", ["length", "format"])
        " (did you mean 'length'?)"
    """
    found = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def check_columns(columns: Collection[str], *, has_environments: bool, name: str = "") -> None:
    """
    Raises:
        ConfigurationError: a column has a name under which reward functions get something else.
    """
    taken = {*GIVEN, *(["environments"] if has_environments else [])} - NOT_COLUMNS
    for column in sorted(taken.intersection(columns)):
        raise ConfigurationError(
            f"{name or 'the dataset'} has a column {column!r}, but reward functions get something else under that "
            "name; rename it"
        )


def no_state() -> object:
    """The trainer's state where there is no trainer."""
    return None


@dataclass(frozen=True, slots=True)
class _Parameters:
    """What a function can be given by name."""

    names: frozenset[str]
    required: tuple[str, ...]
    takes_all: bool

    @classmethod
    def of(cls, function: Callable[..., object], name: str) -> _Parameters:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # written in C, without a signature
            return cls(frozenset(), (), True)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
                raise ConfigurationError(
                    f"reward function {name!r}: parameter {parameter.name!r} is positional-only, but everything is "
                    "given by name; remove the '/' from its signature"
                )
        return cls(
            names=frozenset(p.name for p in named),
            required=tuple(p.name for p in named if p.default is p.empty),
            takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )


class RewardFunction:
    """A reward function as a source of rewards: sync ones run in a worker thread, async ones on the loop.

    It is called once per group and gets keyword arguments, all lists with one item per completion::

        prompts          the openings: strings, or lists of messages in chats
        completions      what followed: strings, or lists of messages (assistant, tool, user)
        completion_ids   lists of token ids, tool results included
        environments     the live instances, where there are environments
        <column>         every column of the dataset but prompt, completion and completion_ids

    and besides ``trainer_state``, ``log_metric(name, value)`` and ``log_extra(column, values)``. A function without
    ``**kwargs`` gets those that it names. Everything it gets but environments and the state is a copy.

    Args:
        function: the callable. It returns one number (or None: does not apply) per completion.
        name: its name in logs, messages and weights.
        trainer_state: called for ``trainer_state`` whenever the function is.
        columns: the dataset's columns; empty without a dataset, None where they are not known before a row is seen.
        has_environments: whether ``environments`` will be given.
        has_tools: see ``exchange_of``.

    Raises:
        ConfigurationError: a required parameter that can never be given, or a column whose name is taken.

    Example:
        >>> def short(completions, limit):
        ...     return [float(len(text) <= most) for text, most in zip(completions, limit, strict=True)]
        >>> RewardFunction(short, "short", columns=frozenset({"prompt"}))
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: reward function 'short' requires 'limit', which it is never given. It can \
get completion_ids, completions, log_extra, log_metric, prompts, trainer_state: rename the parameter, give it a \
default, or add the column to the dataset
    """

    def __init__(
        self,
        function: Callable[..., object],
        name: str,
        trainer_state: Callable[[], object] = no_state,
        *,
        columns: frozenset[str] | None = frozenset(),
        has_environments: bool = False,
        has_tools: bool = False,
    ) -> None:
        self._function = function
        self._name = name
        self._trainer_state = trainer_state
        self._has_tools = has_tools
        self._parameters = _Parameters.of(function, name)
        self._has_environments = has_environments
        if columns is not None:
            self.check_dataset(columns)

    @property
    def name(self) -> str:
        return self._name

    def check_dataset(self, columns: frozenset[str], name: str = "") -> None:
        """
        Raises:
            ConfigurationError: rows with these columns lack what the function requires, or a column's name is taken;
                ``name`` is the dataset's, where there are several.
        """
        check_columns(columns, has_environments=self._has_environments, name=name)
        given = {*GIVEN, *columns - NOT_COLUMNS, *(["environments"] if self._has_environments else [])}
        self._check_required(given, name)

    async def score(self, batch: RewardBatch) -> list[float | None]:
        """One finite reward per episode; None where it does not apply.

        Raises:
            RewardFailure: it raised, or returned an infinite reward.
            RewardTimeout: it took longer than ``batch.timeout`` seconds.
            ConfigurationError: what it returned or logged is not one value per completion, or it requires a parameter
                that this task's row lacks.
        """
        if not batch.episodes:
            return []
        log = _CallLog(self._name, len(batch.episodes))
        where = f"reward function {self._name!r}"
        outcome = await call_user(
            where,
            self._function,
            workers=batch.workers,
            timeout=batch.timeout,
            arguments=self._arguments(batch, log),
        )
        value = value_of(outcome, where, batch.timeout)
        rewards = read_rewards(value, batch.episodes, self._name)
        log.merge_into(batch.log)
        return rewards

    def _arguments(self, batch: RewardBatch, log: _CallLog) -> dict[str, object]:
        exchanges = [exchange_of(episode, has_tools=self._has_tools) for episode in batch.episodes]
        rows = [episode.task.row or {} for episode in batch.episodes]
        columns = [name for name in rows[0] if name not in NOT_COLUMNS]
        check_columns(columns, has_environments=batch.environments is not None)
        given: dict[str, object] = {name: [copied(row[name]) for row in rows] for name in columns}
        given |= {
            "prompts": [exchange.prompt for exchange in exchanges],
            "completions": [exchange.completion for exchange in exchanges],
            "completion_ids": [exchange.completion_ids for exchange in exchanges],
            "trainer_state": self._trainer_state(),
            "log_metric": log.metric,
            "log_extra": log.extra,
        }
        if batch.environments is not None:
            given["environments"] = list(batch.environments)
        self._check_required(given.keys())
        if self._parameters.takes_all:
            return given
        return {name: value for name, value in given.items() if name in self._parameters.names}

    def _check_required(self, given: Collection[str], dataset: str = "") -> None:
        for name in self._parameters.required:
            if name not in given:
                raise ConfigurationError(
                    f"reward function {self._name!r} requires {name!r}, which it is never given"
                    f"{' in ' + dataset if dataset else ''}{nearest(name, given)}. "
                    f"It can get {', '.join(sorted(given))}: rename the parameter, give it a default, or add the "
                    "column to the dataset"
                )


@dataclass(slots=True)
class _CallLog:
    """What one call logged. Its methods may be called from any thread; a call that failed leaves nothing behind."""

    function: str
    count: int
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, list[object]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def metric(self, name: str, value: SupportsFloat) -> None:
        """``log_metric``: a number, averaged over the step; NaN is left out."""
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"reward function {self.function!r}: log_metric needs a name, got {name!r}")
        if isinstance(value, str) or not isinstance(value, SupportsFloat):
            raise ConfigurationError(
                f"reward function {self.function!r}: log_metric({name!r}, ...) needs a number, got {value!r}"
            )
        number = float(value)
        if not math.isnan(number):
            with self.lock:
                self.metrics.setdefault(name, []).append(number)

    def extra(self, column: str, values: Iterable[object]) -> None:
        """``log_extra``: one value per completion, in one call or in several."""
        if not isinstance(column, str) or not column:
            raise ConfigurationError(f"reward function {self.function!r}: log_extra needs a column, got {column!r}")
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise ConfigurationError(
                f"reward function {self.function!r}: log_extra({column!r}, ...) needs a list with one value per "
                f"completion, got {values!r}"
            )
        items = [copied(value) for value in values]
        with self.lock:
            self.extras.setdefault(column, []).extend(items)

    def merge_into(self, log: RewardLog) -> None:
        """
        Raises:
            ConfigurationError: a column without one value per completion.
        """
        with self.lock:
            for column, values in self.extras.items():
                if len(values) != self.count:
                    raise ConfigurationError(
                        f"reward function {self.function!r} logged {len(values)} values as {column!r} for {self.count} "
                        "completions; log_extra needs one for each"
                    )
            for column, values in self.extras.items():
                # Two functions may log one column, as two accuracy rewards do: both are kept.
                log.extras[f"{self.function}/{column}" if column in log.extras else column] = list(values)
            for name, numbers in self.metrics.items():
                log.metrics.setdefault(name, []).extend(numbers)
