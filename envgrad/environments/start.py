"""A group shares one start: how siblings get it, and how their starts are compared.

``decide_start`` says how, by the first that applies::

    IDENTITY      reset names group_id, seed or task_index     each sibling resets with the same ones
    ROW           reset names a column of the row              each sibling resets with the same row
    FORK          the environment has fork()                   one resets, fork() makes the siblings
    COPY          deepcopy is safe (see copy_safety)           one resets, deepcopy makes the siblings
    INDEPENDENT   nothing of these                             each resets on its own

In every case the starts are compared: ``start_difference`` looks at both right after their resets; only where they are
not plainly equal are pictures taken (``fingerprint``), in which ``compare_starts`` names the first difference. What is
skipped by type (siblings with an equal start may keep ids, clocks, locks and clients of their own) is listed in
``state_walk``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from inspect import isawaitable, iscoroutine
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from envgrad.environments.copy_safety import copy_hazard, is_copy_safe
from envgrad.environments.dataset_tasks import ROUTE
from envgrad.environments.isolation import Stream
from envgrad.environments.spec import Elsewhere
from envgrad.environments.state_compare import same_state
from envgrad.environments.state_walk import Snapshot, Walker, first_difference
from envgrad.errors import EnvironmentContractError
from envgrad.types import Message, Task

if TYPE_CHECKING:
    from envgrad.environments.spec import EnvironmentSpec

__all__ = [
    "SiblingStart",
    "StartFingerprint",
    "StartMode",
    "compare_starts",
    "copy_hazard",
    "decide_start",
    "fingerprint",
    "fork_instance",
    "is_copy_safe",
    "start_difference",
    "told_state",
]

_NO_INSTANCE = object()


@runtime_checkable
class _Forks(Protocol):
    def fork(self) -> object: ...


@runtime_checkable
class _TellsStart(Protocol):
    def start_state(self) -> object: ...


class StartMode(StrEnum):
    """How the siblings of a group get their common start."""

    IDENTITY = "identity"
    ROW = "row"
    FORK = "fork"
    COPY = "copy"
    INDEPENDENT = "independent"

    @property
    def resets_each(self) -> bool:
        """Whether every sibling is reset; else one is, and the others are made from it by ``fork_instance``."""
        return self not in (StartMode.FORK, StartMode.COPY)


def decide_start(spec: EnvironmentSpec, task: Task, instance: object = _NO_INSTANCE) -> StartMode:
    """How the siblings of ``task``'s group get their common start.

    Whether copying is safe can be told only from an instance that has been reset. Without one, ``COPY`` means: reset
    one, and ask again with it. ``reset(**kwargs)`` takes everything but names nothing, so it chooses neither of the
    first two.

    Example:
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Dice:
        ...     def reset(self, seed): self.eyes = seed % 6 + 1
        >>> spec, _ = inspect_environment("dice", Dice)
        >>> decide_start(spec, Task(position=0, split="train", environment="dice", group_id=5, seed=6)).value
        'identity'
    """
    if spec.stateless:  # the row's prompt is the whole start
        return StartMode.INDEPENDENT
    if spec.uses_task_identity:
        return StartMode.IDENTITY
    if task.row is not None and not spec.reset_names.isdisjoint(set(task.row) - {"prompt", ROUTE}):
        return StartMode.ROW
    if spec.has_fork:
        return StartMode.FORK
    if spec.copies_elsewhere:
        unsafe = isinstance(instance, Elsewhere) and not instance.copy_safe
        return StartMode.INDEPENDENT if unsafe else StartMode.COPY
    if spec.has_close or (instance is not _NO_INSTANCE and not is_copy_safe(instance)):
        return StartMode.INDEPENDENT
    return StartMode.COPY


def fork_instance(instance: object) -> object:
    """A new, independent instance in the same state: by its ``fork()`` where it has one, else by ``copy.deepcopy``.

    Runs user code (``fork``, and whatever copying reaches), so call it inside the boundary.

    Raises:
        EnvironmentContractError: ``fork()`` is async or gave no new instance.

    Example:
        >>> class Dice:
        ...     def __init__(self): self.rolls = [3, 5]
        >>> dice = Dice()
        >>> fork_instance(dice).rolls == dice.rolls, fork_instance(dice).rolls is dice.rolls
        (True, False)
    """
    if not isinstance(instance, _Forks):
        return copy.deepcopy(instance)
    forked = _checked_sync(instance.fork(), f"fork() of {type(instance).__qualname__}")
    if forked is None or forked is instance:
        what = "None" if forked is None else "the instance itself"
        raise EnvironmentContractError(
            f"fork() of {type(instance).__qualname__} returned {what}; it must return a new, independent instance"
        )
    return forked


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFingerprint:
    """A picture of one sibling right after its reset, by value: later turns do not change it."""

    messages: Snapshot
    tools: Snapshot
    state: Snapshot
    state_path: str
    not_compared: tuple[str, ...]
    """paths of the state that could not be read, and why"""


def fingerprint(
    instance: object, spec: EnvironmentSpec, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
) -> StartFingerprint:
    """Take the picture. ``tools`` are the tools' schemas.

    The state is every attribute of ``instance``, or what ``start_state()`` returns where there is one (user code, so
    call it inside the boundary).

    Raises:
        EnvironmentContractError: ``start_state`` is async.

    Example:
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Dice:
        ...     def reset(self): self.rolls = [3, 5]
        >>> spec, dice = inspect_environment("dice", Dice)
        >>> dice.reset()
        >>> first = fingerprint(dice, spec, [{"role": "user", "content": "Roll."}], [])
        >>> dice.rolls[1] = 6
        >>> compare_starts(first, fingerprint(dice, spec, [{"role": "user", "content": "Roll."}], []))
        'rolls[1]: 5 != 6'
    """
    path = "start_state()" if spec.has_start_state else ""
    return _picture(SiblingStart(messages=messages, tools=tools, state=told_state(instance, spec), state_path=path))


def told_state(instance: object, spec: EnvironmentSpec) -> object:
    """What stands for the state: ``start_state()`` where there is one (user code, as for ``fingerprint``), or it all.

    Raises:
        EnvironmentContractError: ``start_state`` is async.
    """
    if spec.has_start_state and isinstance(instance, _TellsStart):
        return _checked_sync(instance.start_state(), f"start_state() of {spec.label}")
    return instance


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingStart:
    """One sibling right after its reset, as it lies there: compare it before it is played on."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]]
    """the tools' schemas"""
    state: object
    """see ``told_state``"""
    state_path: str = ""
    stream: Stream | None = None
    """its view of the process-global random generators, if it draws from them"""


def start_difference(first: SiblingStart, other: SiblingStart) -> str | None:
    """``compare_starts`` without pictures where the starts are equal: cheap enough for every group.

    Where two streams stand at different places, the generator is named: later draws will differ.

    Example:
        >>> def start(word):
        ...     return SiblingStart(messages=[], tools=[], state={"word": word}, state_path="start_state()")
        >>> start_difference(start("cat"), start("cat")), start_difference(start("cat"), start("dog"))
        (None, "start_state()['word']: 'cat' != 'dog'")
    """
    if not (
        same_state(first.messages, other.messages)
        and same_state(first.tools, other.tools)
        and same_state(first.state, other.state)
    ):
        found = compare_starts(_picture(first), _picture(other))
        if found is not None:
            return found
    if first.stream is None or other.stream is None:
        return None
    generator = first.stream.difference(other.stream)
    return generator and f"the global generator of {generator}: the siblings have drawn differently from it"


def _picture(start: SiblingStart) -> StartFingerprint:
    walker = Walker()
    return StartFingerprint(
        messages=Walker().walk(list(start.messages), "messages"),
        tools=Walker().walk(list(start.tools), "tools"),
        state=walker.walk(start.state, start.state_path),
        state_path=start.state_path,
        not_compared=tuple(walker.not_compared),
    )


def compare_starts(first: StartFingerprint, other: StartFingerprint) -> str | None:
    """How two siblings' starts differ: the path of the first difference and both values in short; None if they do not.

    Opening messages come first, then the tools, then the state, attribute by attribute in the order of their names.
    """
    difference = (
        first_difference(first.messages, other.messages, "messages")
        or first_difference(first.tools, other.tools, "tools")
        or first_difference(first.state, other.state, first.state_path)
    )
    return None if difference is None else f"{difference.path}: {difference.first} != {difference.other}"


def _checked_sync(result: object, what: str) -> object:
    if isawaitable(result):
        if iscoroutine(result):
            result.close()
        raise EnvironmentContractError(f"{what} is async; it must be a plain method")
    return result
