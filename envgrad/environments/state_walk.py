"""A picture of an object's state by value, and the first place where two pictures differ.

The picture is nested tuples and dicts of plain values, so that equal ones compare at C speed; only unequal ones are
walked to name the place. It is bounded in nodes and depth, and safe against cycles: a second visit of an object becomes
a reference to the path of the first.

What has no value to compare stands as ``SKIPPED``, which equals anything:

- by type, silently: ``uuid.UUID``, ``datetime``, ``time`` and ``struct_time`` (ids and clocks differ between equal
  starts), locks, threads, sockets, files, processes, loggers and well-known clients, and strings and paths that exist
  in the temporary folder;
- listed in ``not_compared``: objects without readable attributes (generators, iterators, C extension types), classes
  named ``...Client``, ``...Connection`` or ``...Socket``, elements that cannot be looked up by value (objects as
  dictionary keys or set elements), and what lies beyond the bounds.

A float from a clock or an id kept as a string is compared as what it is: use ``start_state()`` to leave it out.
"""

from __future__ import annotations

import random
import re
import sys
import time
import types
from array import array
from collections import deque
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from envgrad.environments.copy_safety import attributes_of, is_plain_array, is_temporary_path, temporary_roots

MAX_NODES = 20_000
MAX_DEPTH = 150
MAX_ARRAY = 4096
"""Elements up to which an array is kept by value; larger ones as a digest."""

Snapshot: TypeAlias = object
"""A leaf, a ``Node``, an ``Opaque``, a ``Reference`` or a ``Mark``."""


class Mark(Enum):
    SKIPPED = "(not compared)"
    MISSING = "(missing)"


class Node(NamedTuple):
    """A container or an object: ``items`` is a tuple, a dict or a frozenset of snapshots."""

    kind: str
    items: tuple[Snapshot, ...] | dict[Any, Snapshot] | frozenset[Snapshot]
    by_name: bool = False
    """the items are attributes"""


class Opaque(NamedTuple):
    """A value that is compared as a whole: a random generator's state, a large array's digest, a function's name."""

    kind: str
    value: Snapshot


class Reference(NamedTuple):
    """An object that was met before, at ``path``."""

    path: str


LEAVES: frozenset[type] = frozenset(
    [
        type(None),
        bool,
        int,
        float,
        complex,
        bytes,
        range,
        type(Ellipsis),
        Decimal,
        Fraction,
        date,
        timedelta,
        re.Pattern,
    ]
)
_SKIPPED_TYPES = (UUID, datetime, time_of_day, time.struct_time, random.SystemRandom)
_SKIPPED_MODULES = frozenset(
    {"_thread", "threading", "_socket", "socket", "_ssl", "ssl", "select", "selectors", "subprocess", "asyncio"}
    | {"_asyncio", "concurrent", "multiprocessing", "_multiprocessing", "_io", "tempfile", "http", "urllib", "ftplib"}
    | {"smtplib", "imaplib", "xmlrpc", "sqlite3", "_sqlite3", "logging", "requests", "urllib3", "httpx", "httpcore"}
    | {"aiohttp", "websockets", "websocket", "grpc", "openai", "anthropic", "docker", "kubernetes", "paramiko", "redis"}
    | {"pymongo", "psycopg", "psycopg2", "sqlalchemy", "boto3", "botocore", "playwright", "selenium"}
)
"""Top-level modules whose objects are locks, files, processes or clients."""

_CLIENT_NAME = re.compile(r"(Client|Connection|Socket)$")


def is_skipped(kind: type) -> bool:
    """Whether instances stand for something outside of the state: an id, a clock, a lock, a file, a client."""
    return issubclass(kind, _SKIPPED_TYPES) or kind.__module__.partition(".")[0] in _SKIPPED_MODULES


def is_client(kind: type) -> bool:
    """Whether the class calls itself a client; its instances are listed as not compared."""
    return _CLIENT_NAME.search(kind.__name__) is not None


@dataclass(slots=True)
class Walker:
    """Takes one picture. ``not_compared`` lists the paths (and types) that it could not read.

    Example:
        >>> first, other = Walker().walk({"cells": [1, 2]}, "board"), Walker().walk({"cells": [1, 3]}, "board")
        >>> first_difference(first, other, "board")
        Difference(path="board['cells'][1]", first='2', other='3')
    """

    not_compared: list[str] = field(default_factory=list)
    _roots: tuple[str, ...] = field(default_factory=temporary_roots)
    _nodes: int = 0
    _seen: dict[int, tuple[object, str]] = field(default_factory=dict)
    """by id: the object, kept alive so that its id stays its own, and its path"""

    def walk(self, value: object, path: str, depth: int = 0) -> Snapshot:
        kind = type(value)
        if kind in LEAVES or isinstance(value, Enum):
            return value
        if isinstance(value, str):
            text = str.__str__(value)  # of a subclass, the plain text: its `==` is the user's
            return Mark.SKIPPED if is_temporary_path(text, self._roots) else text
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, bytes):
            return bytes.__getitem__(value, slice(None))
        if is_skipped(kind):
            return Mark.SKIPPED
        if self._nodes >= MAX_NODES or depth >= MAX_DEPTH:
            bound = f"more than {MAX_NODES} values" if self._nodes >= MAX_NODES else f"{MAX_DEPTH} levels deep"
            return self._unread(path, f"and what follows: {bound}")
        self._nodes += 1
        if isinstance(value, (tuple, frozenset)):
            return self._container(value, path, depth)
        if is_plain_array(value):
            return self._array(value, path, depth)
        if (special := _special(value, self._roots)) is not None:
            return special
        if (met := self._seen.get(id(value))) is not None:
            return Reference(met[1])
        self._seen[id(value)] = value, path
        if isinstance(value, (list, dict, set, deque, array, bytearray)):
            return self._container(value, path, depth)
        return self._object(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> Snapshot:
        kind = type(value).__qualname__
        if isinstance(value, dict):
            items = Node(kind, self._mapping(dict.copy(value), path, depth))
        elif isinstance(value, (set, frozenset)):
            items = Node(kind, self._set(value, path))
        elif set(map(type, value)) <= {int, bool, type(None)}:
            items = Node(kind, tuple(value))
        else:
            items = Node(kind, tuple([self.walk(x, f"{path}[{i}]", depth + 1) for i, x in enumerate(value)]))
            self._nodes += len(value)
        own = attributes_of(value)
        return Node(kind, {"": items, **self._attributes(own, path, depth)}, True) if own else items

    def _mapping(self, value: dict[Any, object], path: str, depth: int) -> dict[Any, Snapshot]:
        """By value of the keys, walked in sorted order where they are strings: equal dicts need not share an order."""
        keys = sorted(value) if set(map(type, value)) == {str} else list(value)
        found: dict[Any, Snapshot] = {}
        for key in keys:
            if (name := _lookup(key)) is _UNREADABLE:
                self._unread(path, f"with the key of type {type(key).__qualname__}")
            else:
                found[name] = self.walk(value[key], f"{path}[{key!r}]", depth + 1)
        self._nodes += len(found)
        return found

    def _set(self, value: set[object] | frozenset[object], path: str) -> frozenset[Snapshot] | tuple[Snapshot, ...]:
        names = [_lookup(element) for element in value]
        self._nodes += len(names)
        if any(name is _UNREADABLE for name in names):
            self._unread(path, "with elements that cannot be compared by value; only their number is")
            return (len(names),)
        return frozenset(names)

    def _attributes(self, attributes: dict[str, object], path: str, depth: int) -> dict[str, Snapshot]:
        prefix = f"{path}." if path else ""
        return {name: self.walk(attributes[name], f"{prefix}{name}", depth + 1) for name in sorted(attributes)}

    def _object(self, value: object, path: str, depth: int) -> Snapshot:
        kind = type(value)
        if is_client(kind):
            return self._unread(path, f"of type {kind.__qualname__}")
        attributes = attributes_of(value)
        if not attributes and not is_empty_by_nature(kind):
            return self._unread(path, f"of type {kind.__qualname__}")
        return Node(kind.__qualname__, self._attributes(attributes, path, depth), True)

    def _array(self, value: Any, path: str, depth: int) -> Snapshot:
        kind = type(value).__qualname__
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and isinstance(value, numpy.random.RandomState):
            return Opaque(kind, self.walk(value.get_state(legacy=False), path, depth + 1))
        if numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator)):
            source = value.bit_generator if isinstance(value, numpy.random.Generator) else value
            return Opaque(kind, self.walk(source.state, path, depth + 1))
        if numpy is not None and isinstance(value, numpy.dtype):
            return Opaque(kind, str(value))
        if numpy is not None and isinstance(value, numpy.generic):
            return value.item() if isinstance(value, (numpy.number, numpy.bool_)) else Opaque(kind, value.tobytes())
        kind = f"{kind} of {value.dtype} {tuple(value.shape)}"
        size = value.numel() if torch is not None and isinstance(value, torch.Tensor) else value.size
        if size <= MAX_ARRAY or (numpy is not None and value.dtype == object):
            return self._in_shape(kind, value.tolist(), path, depth)
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return Opaque(kind, blake2b(value.tobytes(), digest_size=16).hexdigest())

    def _in_shape(self, kind: str, values: object, path: str, depth: int) -> Snapshot:
        """An array's elements; ``kind`` keeps its type and shape."""
        self._nodes += 1
        if isinstance(values, list) and all(isinstance(row, list) for row in values):
            rows = [self._in_shape("row", row, f"{path}[{i}]", depth + 1) for i, row in enumerate(values)]
            return Node(kind, tuple(rows))
        if isinstance(values, list):
            return Node(kind, tuple([self.walk(x, f"{path}[{i}]", depth + 1) for i, x in enumerate(values)]))
        return Node(kind, (self.walk(values, path, depth + 1),))

    def _unread(self, path: str, why: str) -> Mark:
        text = f"{path or 'the environment'} {why}"
        if not self.not_compared or self.not_compared[-1] != text:
            self.not_compared.append(text)
        return Mark.SKIPPED


class _Empty:
    """As large as an instance without any state."""


def is_empty_by_nature(kind: type) -> bool:
    """Whether an instance without attributes has no state at all: its class is written in Python, not in C."""
    in_python = any("__dict__" in vars(base) or "__slots__" in vars(base) for base in kind.__mro__[:-1])
    return in_python and kind.__basicsize__ <= _Empty.__basicsize__


def _special(value: object, roots: tuple[str, ...]) -> Snapshot:
    """Values with a meaning of their own; None if ``value`` is none of them."""
    if isinstance(value, random.Random):
        return Opaque(type(value).__qualname__, random.Random.getstate(value))
    if isinstance(value, PurePath):
        return Mark.SKIPPED if is_temporary_path(str(value), roots) else Opaque("path", str(value))
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return Opaque("reference to", f"{value.__module__}.{value.__qualname__}")
    if isinstance(value, types.ModuleType):
        return Opaque("module", value.__name__)
    return None


_UNREADABLE = object()


def _lookup(key: object) -> Any:
    """``key`` as something that can be looked up by value; ``_UNREADABLE`` if it cannot."""
    if type(key) in LEAVES or isinstance(key, (str, int, float, bytes, Enum)):
        return key
    if isinstance(key, (tuple, frozenset)):
        parts = [_lookup(part) for part in key]
        if any(part is _UNREADABLE for part in parts):
            return _UNREADABLE
        return tuple(parts) if isinstance(key, tuple) else frozenset(parts)
    return _UNREADABLE


class Difference(NamedTuple):
    """Where two pictures differ first, and both values in short."""

    path: str
    first: str
    other: str


def first_difference(first: Snapshot, other: Snapshot, path: str = "") -> Difference | None:
    """The first place, in attribute and item order, where two pictures differ; None if they do not.

    Equal by value: 1 and 1.0 are, NaN and NaN are. A reference is compared with a reference only, by the path it
    points to.
    """
    if first is other or first == other or Mark.SKIPPED in (first, other):
        return None
    if isinstance(first, Reference) and isinstance(other, Reference):
        return Difference(path, f"the same object as {first.path}", f"the same object as {other.path}")
    if isinstance(first, Reference) or isinstance(other, Reference):
        return None
    if isinstance(first, Node) and isinstance(other, Node) and first.kind == other.kind:
        return _inside(first, other, path)
    if first != first and other != other:  # NaN
        return None
    return Difference(path, *_short_pair(first, other))


def _inside(first: Node, other: Node, path: str) -> Difference | None:
    mine, theirs = first.items, other.items
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({**mine, **theirs}, key=lambda key: (type(key).__name__, repr(key))):
            place = _attribute(path, key) if first.by_name else f"{path}[{key!r}]"
            found = first_difference(mine.get(key, Mark.MISSING), theirs.get(key, Mark.MISSING), place)
            if found is not None:
                return found
        return None
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        shared = min(len(mine), len(theirs))
        for index, (left, right) in enumerate(zip(mine[:shared], theirs[:shared], strict=True)):
            found = first_difference(left, right, f"{path}[{index}]")
            if found is not None:
                return found
        return None if len(mine) == len(theirs) else Difference(path, f"{len(mine)} items", f"{len(theirs)} items")
    if isinstance(mine, frozenset) and isinstance(theirs, frozenset):
        return Difference(path, *(_short(sorted(items, key=repr)) for items in (mine - theirs, theirs - mine)))
    return None  # a set that could be compared on one side only


def _attribute(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _short_pair(first: object, other: object) -> tuple[str, str]:
    """Both in short; of two long strings, the part around the first character that differs."""
    if isinstance(first, str) and isinstance(other, str) and max(len(first), len(other)) > 60:
        same = 0
        while same < min(len(first), len(other)) and first[same] == other[same]:
            same += 1
        start = max(0, same - 20)
        lead = "..." if start else ""
        return lead + _short(first[start:]), lead + _short(other[start:])
    return _short(first), _short(other)


def _short(value: object) -> str:
    if isinstance(value, Mark):
        return value.value
    if isinstance(value, Node):
        return value.kind if value.by_name else f"{value.kind} of {len(value.items)} items"
    if isinstance(value, Reference):
        return f"the same object as {value.path}"
    if isinstance(value, Opaque) and not isinstance(value.value, str):
        return f"{value.kind} in state {blake2b(repr(value.value).encode(), digest_size=4).hexdigest()}"
    text = f"{value.kind} {value.value}" if isinstance(value, Opaque) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
