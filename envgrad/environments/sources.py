"""Where tasks come from when environments own them: one environment, or several mixed by weight.

A source says *what* comes next (``Draw``); ``tasks.TaskStream`` numbers the draws and gives each its identity. Sources
depend on the run's seed and on how much has been drawn, on nothing else, so their whole state is a few counters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.environments.spec import EnvironmentSpec

Row: TypeAlias = Mapping[str, Any]
State: TypeAlias = dict[str, object]
"""JSON-able"""

_64_BITS = (1 << 64) - 1

SHUFFLED_AS_LIST = 1 << 16
"""Up to this length an epoch's order is one shuffled list; longer ones are computed index by index."""


def hash63(*parts: int | str) -> int:
    """A stable 63-bit hash of ``parts``: equal in every process and Python version, and never 0, 1 or 2.

    Small numbers are left out because games give them a meaning of their own (``seed=0`` is often "no seed").

    Example:
        >>> hash63("seed", 7) == hash63("seed", 7), hash63("seed", 7) == hash63("seed", "7")
        (True, False)
    """
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    for salt in range(1 << 16):
        digest = blake2b(text.encode(), digest_size=8, salt=salt.to_bytes(8, "big")).digest()
        if (value := int.from_bytes(digest, "big") >> 1) > 2:
            return value
    raise AssertionError("blake2b gave 0, 1 or 2 for 65536 salts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a source hands out: a ``Task`` without its identity."""

    environment: str
    task_index: int | None = None
    epoch: int = 0
    row: Row | None = None


class TaskSource(Protocol):
    """Says which task comes next. Its state is JSON-able, and loading it continues exactly behind it."""

    @property
    def epoch_length(self) -> int | None:
        """Draws in one pass over finite data; None if the data is endless or its length is unknown."""
        ...

    @property
    def passes(self) -> float:
        """Passes over finite data so far; 0 for endless data."""
        ...

    def draw(self) -> Draw: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


class EnvironmentTasks:
    """Tasks that one environment owns: endless, or finite where it has ``num_tasks``.

    A finite environment's ``task_index`` runs through ``0 .. num_tasks(split) - 1`` once per epoch, in an order that is
    shuffled anew for each epoch from ``seed`` (``shuffle=False``: in order).

    Raises:
        ConfigurationError: ``num_tasks`` gives no int of at least 1.

    Example:
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Three:
        ...     def reset(self, task_index): return f"Task {task_index}"
        ...     @classmethod
        ...     def num_tasks(cls, split): return 3
        >>> spec, _ = inspect_environment("three", Three)
        >>> tasks = EnvironmentTasks(spec, seed=0, split="train")
        >>> sorted(tasks.draw().task_index for _ in range(3)), tasks.passes
        ([0, 1, 2], 1.0)
    """

    def __init__(self, spec: EnvironmentSpec, *, seed: int, split: str, shuffle: bool = True) -> None:
        self.name = spec.name
        self.drawn = 0
        self._order: EpochOrder | None = None
        if spec.num_tasks is not None:
            length = spec.num_tasks(split)
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise ConfigurationError(
                    f"num_tasks({split!r}) of {spec.label} is {length!r}; it must be an int of at least 1 "
                    "(leave num_tasks out if the tasks are endless)"
                )
            self._order = EpochOrder(length, (seed, split, spec.name) if shuffle else None)

    @property
    def epoch_length(self) -> int | None:
        return None if self._order is None else self._order.length

    @property
    def passes(self) -> float:
        return 0.0 if self._order is None else self.drawn / self._order.length

    def draw(self) -> Draw:
        number = self.drawn
        self.drawn += 1
        if self._order is None:
            return Draw(environment=self.name)
        epoch, index = self._order.at(number)
        return Draw(environment=self.name, task_index=index, epoch=epoch)

    def state_dict(self) -> State:
        return {"drawn": self.drawn, "length": self.epoch_length}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        check_same(state, "length", self.epoch_length, f"num_tasks of environment {self.name!r}")
        self.drawn = read_count(state, "drawn")


@dataclass(frozen=True, slots=True)
class _Member:
    """One environment of a mixture."""

    tasks: EnvironmentTasks
    share: Fraction


class MixtureTasks:
    """Tasks of several environments, mixed by weight with a guaranteed share.

    After ``n`` draws every environment has been drawn within 1 of ``n * weight`` times (weights are normalised): not
    on average, as random draws would, but always. Of the environments that are behind their share, the one whose next
    draw is due first is drawn; ties go by order. (Earliest deadline first keeps every count within 1, see Tijdeman,
    "The chairman assignment problem", 1980; taking the one that is furthest behind does not.) Weights are exact as
    written: 0.1 is one tenth.

    A small environment repeats while a larger one is not through, so a pass over the mixture is the least number of
    draws that surely runs through all: ``max(num_tasks / weight)``. One endless environment makes the mixture endless.

    Raises:
        ConfigurationError: no environment, or a weight that is not positive and finite.

    Example:
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Echo:
        ...     def reset(self): return "Say something."
        >>> a, b = (inspect_environment(name, Echo)[0] for name in "ab")
        >>> mixture = MixtureTasks([a, b], [0.75, 0.25], seed=0, split="train")
        >>> "".join(mixture.draw().environment for _ in range(8))
        'aaabaaab'
    """

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        weights: Sequence[float],
        *,
        seed: int,
        split: str,
        shuffle: bool = True,
    ) -> None:
        if not specs:
            raise ConfigurationError("a mixture of environments needs at least one environment, got none")
        shares = [exact_weight(spec.name, weight) for spec, weight in zip(specs, weights, strict=True)]
        self._members = [
            _Member(EnvironmentTasks(spec, seed=seed, split=split, shuffle=shuffle), share / sum(shares))
            for spec, share in zip(specs, shares, strict=True)
        ]
        self._drawn = 0

    @property
    def epoch_length(self) -> int | None:
        lengths = [
            math.ceil(member.tasks.epoch_length / member.share)
            for member in self._members
            if member.tasks.epoch_length is not None
        ]
        return max(lengths) if len(lengths) == len(self._members) else None

    @property
    def passes(self) -> float:
        length = self.epoch_length
        return 0.0 if length is None else self._drawn / length

    def draw(self) -> Draw:
        self._drawn += 1
        behind = [member for member in self._members if self._drawn * member.share > member.tasks.drawn]
        return min(behind, key=lambda member: (member.tasks.drawn + 1) / member.share).tasks.draw()

    def state_dict(self) -> State:
        return {
            "shares": {member.tasks.name: str(member.share) for member in self._members},
            "environments": {member.tasks.name: member.tasks.state_dict() for member in self._members},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        check_same(state, "shares", self.state_dict()["shares"], "the environments and their weights")
        states = read_mapping(state, "environments")
        for member in self._members:
            member.tasks.load_state_dict(read_mapping(states, member.tasks.name))
        self._drawn = sum(member.tasks.drawn for member in self._members)


class EpochOrder:
    """The order in which draws run through ``length`` indices: each once per epoch, another shuffle for each epoch.

    Any draw's index can be told from its number, so nothing but the number has to be kept. ``key=None``: in order.

    Example:
        >>> [EpochOrder(2, None).at(number) for number in range(3)]
        [(0, 0), (0, 1), (1, 0)]
        >>> sorted(EpochOrder(10**12, (7,)).at(number)[1] < 10**12 for number in range(2))
        [True, True]
    """

    def __init__(self, length: int, key: tuple[int | str, ...] | None) -> None:
        self.length = length
        self._key = key
        self._epoch: int | None = None
        self._state: list[int] = []
        """of the current epoch: the shuffled indices, or the permutation's keys"""

    def at(self, number: int) -> tuple[int, int]:
        """``(epoch, index)`` of draw ``number``."""
        epoch, position = divmod(number, self.length)
        if self._key is None:
            return epoch, position
        is_listed = self.length <= SHUFFLED_AS_LIST
        if self._epoch != epoch:
            self._epoch = epoch
            random_source = random.Random(hash63("order", *self._key, epoch))
            if is_listed:
                self._state = list(range(self.length))
                random_source.shuffle(self._state)
            else:
                self._state = [random_source.getrandbits(64) for _ in range(4)]
        return epoch, self._state[position] if is_listed else _permuted(position, self.length, self._state)


def _permuted(index: int, length: int, keys: Sequence[int]) -> int:
    """Where a pseudo-random permutation of ``range(length)`` sends ``index``, without building the permutation.

    A Feistel network with one round per key permutes the smallest even number of bits that holds ``length``; results
    outside are sent through it again until they fall inside (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). The rounds mix as SplitMix64 does.
    """
    half = ((length - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            mixed = (right + key) * 0xBF58476D1CE4E5B9 & _64_BITS
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
            left, right = right, (left ^ mixed ^ mixed >> 31) & mask
        index = left << half | right
        if index < length:
            return index


def exact_weight(name: str, weight: float) -> Fraction:
    """The weight as it is written: 0.1 is one tenth.

    Raises:
        ConfigurationError: not positive and finite.
    """
    if isinstance(weight, bool) or not math.isfinite(weight) or weight <= 0:
        raise ConfigurationError(
            f"the weight of environment {name!r} is {weight!r}; weights must be positive and finite "
            "(leave an environment out instead of giving it 0)"
        )
    return Fraction(repr(float(weight)))


def check_same(state: Mapping[str, object], key: str, current: object, what: str) -> None:
    """Raise unless a checkpoint's task state was written with what the run has now: the order would differ."""
    if (saved := _read(state, key)) != current:
        raise ConfigurationError(
            f"{what}: the checkpoint has {saved!r}, this run has {current!r}; resume with the same, or start a new run"
        )


def read_integer(state: Mapping[str, object], key: str) -> int:
    value = _read(state, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"the checkpoint's task state has {key}={value!r}; it must be an int")
    return value


def read_number(state: Mapping[str, object], key: str) -> float:
    value = _read(state, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigurationError(f"the checkpoint's task state has {key}={value!r}; it must be a finite number")
    return float(value)


def read_count(state: Mapping[str, object], key: str) -> int:
    if (value := read_integer(state, key)) < 0:
        raise ConfigurationError(f"the checkpoint's task state has {key}={value!r}; it must be an int of at least 0")
    return value


def read_mapping(state: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = _read(state, key)
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"the checkpoint's task state has {key}={value!r}; it must be a mapping")
    return value


def _read(state: Mapping[str, object], key: str) -> object:
    if not isinstance(state, Mapping):  # it comes from a file
        raise ConfigurationError(f"the checkpoint's task state is {state!r}; it must be a mapping with {key!r}")
    if key not in state:
        raise ConfigurationError(
            f"the checkpoint's task state has no {key!r}, only {sorted(state)}; "
            "it was written by a run with another kind of data"
        )
    return state[key]
