"""Whether ``copy.deepcopy`` of an environment makes an independent environment.

It does where only plain state is reached: scalars, containers, arrays, random generators, and instances of plain Python
classes that hold such state. It does not where something outside the process, or shared by design, stands behind a
value: a temporary folder's path or a client copies "successfully" and is then used by all copies. What is not known to
be plain counts as unsafe: the price of a wrong no is an independent reset, that of a wrong yes is corrupted episodes.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from logging import Logger
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID
from weakref import WeakKeyDictionary

MAX_NODES = 500_000
"""More than this is too slow to copy for each sibling."""

MAX_DEPTH = 120
"""deepcopy recurses; Python's default limit ends it at about 250 levels."""

PLAIN_LEAVES: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, bytes, bytearray, range, type(Ellipsis), Decimal, Fraction, array}
    | {date, datetime, time, timedelta, timezone, UUID, re.Pattern}
)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_BUILTIN_BASES = (object, *_CONTAINERS, int, float, str, bytes, defaultdict, OrderedDict)
_COPY_HOOKS = ("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_OWNERSHIP = ("__del__", "__exit__", "__aexit__", "close", "aclose", "__getattr__")
"""Members of classes that own something to give back, or that answer for another object."""

_Child: TypeAlias = tuple[str, object]


class _Place(NamedTuple):
    """A value and how it was reached."""

    value: object
    label: str
    depth: int
    parent: _Place | None

    @property
    def path(self) -> str:
        labels = []
        place: _Place | None = self
        while place is not None:
            labels.append(place.label)
            place = place.parent
        return "".join(reversed(labels)).lstrip(".") or "the environment itself"


def is_copy_safe(instance: object) -> bool:
    """Whether ``copy.deepcopy(instance)`` is independent of ``instance``: no ``close``, and only plain state reached.

    Example:
        >>> class Dice:
        ...     def __init__(self): self.rolls = [3, 5]
        >>> is_copy_safe(Dice())
        True
        >>> class Browser(Dice):
        ...     def close(self): ...
        >>> is_copy_safe(Browser())
        False
    """
    return copy_hazard(instance) is None


def copy_hazard(instance: object) -> str | None:
    """Why ``instance`` must not be copied, naming the attribute; None if it may.

    Example:
        >>> class Shop:
        ...     def __init__(self): self.orders = {"next": iter([1, 2])}
        >>> copy_hazard(Shop())
        "orders['next'] is a list_iterator, which is not known to be plain state"
    """
    roots = temporary_roots()
    stack = [_Place(instance, "", 0, None)]
    seen: set[int] = set()
    values = 0
    while stack:
        place = stack.pop()
        if id(place.value) in seen:
            continue
        seen.add(id(place.value))
        values += 1 + (len(place.value) if isinstance(place.value, _CONTAINERS) else 0)
        if values > MAX_NODES:
            return f"it reaches more than {MAX_NODES} values, too many to copy for each sibling"
        if place.depth > MAX_DEPTH:
            return f"{place.path} is nested deeper than {MAX_DEPTH} levels, which deepcopy cannot follow"
        hazard = _hazard(place.value, roots)
        if hazard is not None:
            return f"{place.path} {hazard}"
        # reversed: the order, and so the depth, in which deepcopy recurses
        children = list(_children(place.value, roots))
        stack.extend(_Place(child, label, place.depth + 1, place) for label, child in reversed(children))
    return None


def _is_harmless(value: object, roots: tuple[str, ...]) -> bool:
    """Whether ``value`` needs no look of its own; most values of a state do not."""
    return type(value) in PLAIN_LEAVES or (type(value) is str and not value.startswith(roots))


def _hazard(value: object, roots: tuple[str, ...]) -> str | None:
    """What is wrong with ``value`` itself, apart from what it holds."""
    kind = type(value)
    if kind is str:
        if isinstance(value, str) and is_temporary_path(value, roots):
            return "is a path in the temporary folder, which copies would share"
        return None
    if isinstance(value, (Enum, type, Logger)) or kind is random.Random or is_plain_array(value):
        return None
    if isinstance(value, types.FunctionType):
        return "is a function with a closure, which copies would share" if value.__closure__ else None
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, (types.ModuleType, type(None))):
        return None
    if kind in _CONTAINERS or kind in (defaultdict, OrderedDict, Counter):
        return None
    if owner := next((name for name in _OWNERSHIP if hasattr(kind, name)), None):
        return f"is a {kind.__qualname__}, which has {owner}: it owns something, or stands for something else"
    if not has_plain_class(kind) or not _can_be_rebuilt(value):
        return f"is a {kind.__qualname__}, which is not known to be plain state"
    return None


def _children(value: object, roots: tuple[str, ...]) -> Iterable[_Child]:
    """What ``value`` holds and how it is reached, but for what is harmless."""
    if isinstance(value, (Enum, type, Logger, random.Random, types.FunctionType, types.BuiltinFunctionType)):
        return
    if is_plain_array(value):
        yield from ((f"[{index}]", item) for index, item in enumerate(object_items(value)))
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not _is_harmless(key, roots):
                yield " (a key)", key
            if not _is_harmless(item, roots):
                yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", item
        if isinstance(value, defaultdict):
            yield ".default_factory", value.default_factory
    elif isinstance(value, _CONTAINERS) and not PLAIN_LEAVES.issuperset(map(type, value)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value) if not _is_harmless(item, roots))
    if type(value) in _CONTAINERS:
        return
    for name, item in attributes_of(value).items():
        if not _is_harmless(item, roots):
            yield f".{name}", item


_PLAIN_CLASSES: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def has_plain_class(kind: type) -> bool:
    """Whether instances of ``kind`` are copied by Python's own rule, into a new object with copied attributes."""
    if kind not in _PLAIN_CLASSES:
        _PLAIN_CLASSES[kind] = _is_plain_class(kind)
    return _PLAIN_CLASSES[kind]


def _is_plain_class(kind: type) -> bool:
    """Whether instances of ``kind`` are copied by Python's own rule, into a new object with copied attributes."""
    if hasattr(kind, "__deepcopy__"):
        return False
    if _definer(kind, "__reduce_ex__") is not object or _definer(kind, "__reduce__") not in (object, set, deque):
        return False
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return True  # a named tuple: __new__ and __getnewargs__ are the standard library's
    if _definer(kind, "__new__") not in _BUILTIN_BASES:
        return False
    members = [(name, member) for base in kind.__mro__[:-1] for name, member in vars(base).items()]
    hooks = [member for name, member in members if name in _COPY_HOOKS and isinstance(member, types.FunctionType)]
    if any(hook.__module__ != "dataclasses" for hook in hooks):
        return False
    has_slots = any(isinstance(member, types.MemberDescriptorType) for _, member in members)
    return not has_slots or bool(hooks) or _definer(kind, "__setattr__") is object


def _definer(kind: type, name: str) -> type:
    """The class in ``kind``'s method resolution order that defines ``name``, which ``object`` has."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _can_be_rebuilt(value: object) -> bool:
    """Whether Python can rebuild ``value`` from its attributes: not where a C type keeps state of its own."""
    try:
        object.__reduce_ex__(value, 4)
    except TypeError:
        return False
    return True


def attributes_of(value: object) -> dict[str, object]:
    """The instance's own attributes by name: its ``__dict__`` and its slots."""
    found: dict[str, object] = {}
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            for name, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        found[name] = member.__get__(value, kind)
                    except AttributeError:
                        continue  # an unset slot
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found
    found.update(own)
    return found


def temporary_roots() -> tuple[str, ...]:
    """The temporary folder, as it is named and as it resolves."""
    return _with_resolved(tempfile.gettempdir())


@lru_cache(maxsize=4)
def _with_resolved(root: str) -> tuple[str, str]:
    return root, os.path.realpath(root)


def is_temporary_path(text: str, roots: tuple[str, ...]) -> bool:
    """Whether ``text`` is the path of something that exists in the temporary folder."""
    return text.startswith(roots) and len(text) < 4096 and "\0" not in text and os.path.exists(text)


def is_plain_array(value: object) -> bool:
    """Whether ``value`` is an array, scalar, dtype or random generator of numpy, or a torch tensor without gradient.

    Subclasses do not count: a ``memmap`` is a file. Neither library is imported for this.
    """
    kind = type(value)
    if (numpy := sys.modules.get("numpy")) is not None and kind.__module__.startswith("numpy"):
        random_kinds = (numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState)
        return kind is numpy.ndarray or isinstance(value, (numpy.generic, numpy.dtype, *random_kinds))
    if (torch := sys.modules.get("torch")) is not None and kind is torch.Tensor:
        tensor: Any = value
        return not tensor.requires_grad
    return False


def object_items(value: object) -> list[object]:
    """The elements of a numpy array of objects; empty for every other array."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return []
    elements: Any = value
    return list(elements.reshape(-1)) if elements.dtype.hasobject else []
