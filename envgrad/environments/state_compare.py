"""Whether two objects are in the same state, by value, without building anything: the quick look before a picture.

Siblings that share a start are compared in every group, so the usual answer, yes, must cost little: both objects are
walked together, by a plan per type that is made once, and flat containers compare at C speed. A yes here is a yes of
``state_walk``; a no only means that it is for ``state_walk`` to say whether, and where, they differ.
"""

from __future__ import annotations

import random
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any, TypeAlias

from envgrad.environments.copy_safety import is_temporary_path, temporary_roots
from envgrad.environments.state_walk import LEAVES, MAX_DEPTH, MAX_NODES, Walker, is_client, is_skipped

_FLAT: frozenset[type] = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose ``==`` is by value and runs no code of the user's."""

_FLAT_OR_TUPLE = _FLAT | {tuple}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_MISSING = object()

_Plan: TypeAlias = "Callable[[_Comparison, Any, Any], bool]"


def same_state(first: object, other: object) -> bool:
    """Whether both are surely in the same state; False if they differ, or if only a picture can tell.

    At most ``MAX_NODES`` values are compared, ``MAX_DEPTH`` levels deep.

    Example:
        >>> same_state({"cells": [1, [2, 3]]}, {"cells": [1, [2, 3]]}), same_state([1], [2])
        (True, False)
    """
    return _Comparison().same(first, other)


class _Comparison:
    """One walk over two objects."""

    __slots__ = ("depth", "nodes", "pairs")

    def __init__(self) -> None:
        self.depth = 0
        self.nodes = 0
        self.pairs: dict[int, int] = {}
        """by id, what an object of the first was met with; both are alive all the while"""

    def same(self, first: object, other: object) -> bool:
        if first is other:
            return True
        kind = type(first)
        if kind is not type(other):
            return False
        return _plan_of(kind)(self, first, other)

    def all_same(self, first: Any, other: Any) -> bool:
        """Whether the elements of two iterables are the same one by one."""
        self.depth += 1
        for mine, theirs in zip(first, other, strict=True):
            if mine is not theirs and not self.same(mine, theirs):
                return False
        self.depth -= 1
        return True

    def enter(self, first: object, other: object) -> bool | None:
        """Note a pair of objects that may be met again; the answer, if there is no need to look inside."""
        met = self.pairs.get(id(first))
        if met is not None:
            return met == id(other)
        if self.is_at_bound():
            return True
        self.pairs[id(first)] = id(other)
        return None

    def is_at_bound(self) -> bool:
        self.nodes += 1
        return self.nodes > MAX_NODES or self.depth >= MAX_DEPTH


def _make_plan(kind: type) -> _Plan:
    """How two objects of exactly this type are compared."""
    if kind is str:
        return _text
    if kind in LEAVES:
        return _leaf
    if is_skipped(kind):
        return _nothing
    if kind in _FUNCTIONS or issubclass(kind, type):
        return _name
    if kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__):
        return _tuple
    if kind in (list, deque):
        return _sequence
    if kind in (array, bytearray):
        return _flat
    if kind in _DICTS:
        return _mapping
    if kind in (set, frozenset):
        return _set
    if kind is random.Random:
        return _generator
    if kind.__module__.partition(".")[0] == "numpy":
        return _numpy_plan(kind)
    if issubclass(kind, _READ_OTHERWISE) or kind.__module__.partition(".")[0] == "torch":
        return _pictures
    return _nothing if is_client(kind) else _object_plan(kind)


_plan_of: Callable[[type], _Plan] = lru_cache(maxsize=4096)(_make_plan)

_READ_OTHERWISE = (
    *(Enum, int, float, bytes, str, list, tuple, dict, set, frozenset, deque, array, bytearray),
    *(random.Random, PurePath, types.ModuleType),
)
"""``state_walk`` reads instances of subclasses as something else than their attributes."""


def _leaf(_: _Comparison, first: Any, other: Any) -> bool:
    return bool(first == other) or bool(first != first and other != other)


def _text(_: _Comparison, first: str, other: str) -> bool:
    return first == other or any(is_temporary_path(text, temporary_roots()) for text in (first, other))


def _nothing(_: _Comparison, __: object, ___: object) -> bool:
    return True


def _name(_: _Comparison, first: Any, other: Any) -> bool:
    return bool(first.__qualname__ == other.__qualname__ and first.__module__ == other.__module__)


def _tuple(walk: _Comparison, first: Any, other: Any) -> bool:
    if len(first) != len(other):
        return False
    return _are_equal_and_flat(first, other) or walk.is_at_bound() or walk.all_same(first, other)


def _sequence(walk: _Comparison, first: Any, other: Any) -> bool:
    if len(first) != len(other):
        return False
    known = walk.enter(first, other)
    if known is not None:
        return known
    return _are_equal_and_flat(first, other) or walk.all_same(first, other)


def _are_equal_and_flat(first: Any, other: Any) -> bool:
    return set(map(type, first)) <= _FLAT and set(map(type, other)) <= _FLAT and bool(first == other)


def _flat(walk: _Comparison, first: Any, other: Any) -> bool:
    known = walk.enter(first, other)
    return bool(first == other) if known is None else known


def _mapping(walk: _Comparison, first: dict[Any, Any], other: dict[Any, Any]) -> bool:
    if len(first) != len(other):
        return False
    if not (_have_flat_keys(first) and _have_flat_keys(other)):
        return _pictures(walk, first, other)
    known = walk.enter(first, other)
    if known is not None:
        return known
    return walk.all_same(first.values(), [dict.get(other, key, _MISSING) for key in first])


def _have_flat_keys(values: Any) -> bool:
    """Whether looking the keys (or elements) up runs no code of the user's."""
    kinds = set(map(type, values))
    if kinds <= _FLAT:
        return True
    return kinds <= _FLAT_OR_TUPLE and all(set(map(type, key)) <= _FLAT for key in values if type(key) is tuple)


def _set(walk: _Comparison, first: Any, other: Any) -> bool:
    if not (_have_flat_keys(first) and _have_flat_keys(other)):
        return _pictures(walk, first, other)
    return _flat(walk, first, other)


def _generator(_: _Comparison, first: random.Random, other: random.Random) -> bool:
    return first.getstate() == other.getstate()


def _numpy_plan(kind: type) -> _Plan:
    numpy: Any = sys.modules["numpy"]
    if kind is numpy.ndarray or issubclass(kind, numpy.generic):
        return _numpy_values
    if issubclass(kind, (numpy.random.Generator, numpy.random.BitGenerator)):
        return lambda walk, first, other: walk.same(_bits(first).state, _bits(other).state)
    if issubclass(kind, numpy.random.RandomState):
        return lambda walk, first, other: walk.same(first.get_state(legacy=False), other.get_state(legacy=False))
    return _pictures


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def _numpy_values(walk: _Comparison, first: Any, other: Any) -> bool:
    if first.dtype.hasobject:
        return _pictures(walk, first, other)
    return bool(first.dtype == other.dtype and first.shape == other.shape and first.tobytes() == other.tobytes())


def _pictures(_: _Comparison, first: object, other: object) -> bool:
    """For what is seldom found in a state: as ``state_walk`` sees it."""
    return bool(Walker().walk(first, "") == Walker().walk(other, ""))


def _object_plan(kind: type) -> _Plan:
    slots = tuple(
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    )
    if not slots and not kind.__dictoffset__:
        return _nothing  # it has no state, or none that can be read

    def compare(walk: _Comparison, first: object, other: object) -> bool:
        known = walk.enter(first, other)
        if known is not None:
            return known
        if slots and not walk.all_same([_slot(s, first) for s in slots], [_slot(s, other) for s in slots]):
            return False
        mine, theirs = _own(first), _own(other)
        if len(mine) != len(theirs):
            return False
        return walk.all_same(mine.values(), [theirs.get(name, _MISSING) for name in mine])

    return compare


def _slot(member: types.MemberDescriptorType, value: object) -> object:
    try:
        return member.__get__(value, type(value))
    except AttributeError:  # unset
        return _MISSING


def _own(value: object) -> dict[str, object]:
    try:
        found: dict[str, object] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
