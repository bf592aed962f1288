"""An environment's state right after its reset, as text: where no id tells its task, the record of an episode needs it.

Only plain state has a text: scalars, containers, arrays and generators of numpy, ``random.Random``, and instances of
plain classes. It is restored into an instance that the factory made; no class is imported and no code of it runs.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

from envgrad.environments.copy_safety import attributes_of, has_plain_class

MOST_VALUES = 20_000
"""larger states are not recorded"""
_SCALARS = (type(None), bool, int, float, str)


class NotPlain(Exception):
    """A value that has no text."""


def state_text(instance: object) -> str | None:
    """The attributes of ``instance`` as JSON text; None if there is something among them that is not plain.

    Example:
        >>> class Dice:
        ...     def __init__(self): self.rolls, self.seen = [3, 5], {1, 2}
        >>> text = state_text(Dice())
        >>> other = Dice(); other.rolls = []
        >>> restore_state(other, text)
        >>> other.rolls, other.seen
        ([3, 5], {1, 2})
    """
    if not hasattr(instance, "__dict__") or set(attributes_of(instance)) != set(vars(instance)):
        return None
    try:
        encoder = _Encoder()
        return json.dumps({name: encoder.encode(value) for name, value in vars(instance).items()}, ensure_ascii=True)
    except NotPlain:
        return None


def restore_state(instance: object, text: str) -> None:
    """Give ``instance`` the attributes that ``state_text`` has read.

    Raises:
        NotPlain: the text is none of ``state_text``'s, or of a class that is not there any more.
    """
    decoder = _Decoder()
    try:
        attributes = {name: decoder.decode(value) for name, value in json.loads(text).items()}
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise NotPlain(f"the recorded state cannot be read: {error!r}") from error
    own = vars(instance)
    own.clear()
    own.update(attributes)


class _Encoder:
    """Values with a tag where JSON has no form of theirs; what is reached twice is written once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._under_way: set[int] = set()
        self._kept: list[object] = []
        self._left = MOST_VALUES

    def encode(self, value: object) -> Any:
        self._left -= 1
        if self._left < 0:
            raise NotPlain("too large")
        if type(value) in _SCALARS:
            return value
        if id(value) in self._numbers:
            return ["again", self._numbers[id(value)]]
        if id(value) in self._under_way:
            raise NotPlain("it holds itself")
        self._under_way.add(id(value))
        encoded = self._tagged(value)
        self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)  # so that no other value gets its id
        return encoded

    def _tagged(self, value: object) -> list[Any]:
        kind = type(value)
        if isinstance(value, (list, tuple, set, frozenset)) and kind in (list, tuple, set, frozenset):
            return [kind.__name__, [self.encode(one) for one in value]]
        if isinstance(value, dict) and kind is dict:
            return ["dict", [[self.encode(key), self.encode(one)] for key, one in value.items()]]
        if isinstance(value, (bytes, bytearray)) and kind in (bytes, bytearray):
            return [kind.__name__, base64.b64encode(value).decode()]
        if isinstance(value, random.Random) and kind is random.Random:
            version, words, gauss = value.getstate()
            return ["random", version, list(words), gauss]
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind.__module__.partition(".")[0] == "numpy":
            return self._of_numpy(numpy, value)
        return self._of_class(value)

    def _of_numpy(self, numpy: Any, value: Any) -> list[Any]:
        if type(value) is numpy.ndarray and not value.dtype.hasobject:
            data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
            return ["array", value.dtype.str, list(value.shape), data]
        if isinstance(value, numpy.generic) and not value.dtype.hasobject:
            return ["scalar", value.dtype.str, base64.b64encode(value.tobytes()).decode()]
        if type(value) is numpy.random.Generator:
            return ["generator", type(value.bit_generator).__name__, self.encode(value.bit_generator.state)]
        raise NotPlain(f"a {type(value).__name__}")

    def _of_class(self, value: object) -> list[Any]:
        kind = type(value)
        attributes = attributes_of(value)
        own = getattr(value, "__dict__", None)
        if not has_plain_class(kind) or kind.__base__ is not object or own is None or set(attributes) != set(own):
            raise NotPlain(f"a {kind.__name__}")
        if _class_at(kind.__module__, kind.__qualname__) is not kind:
            raise NotPlain(f"a {kind.__qualname__}, which has no name that can be found again")
        return ["object", kind.__module__, kind.__qualname__, {name: self.encode(one) for name, one in own.items()}]


class _Decoder:
    def __init__(self) -> None:
        self._made: list[object] = []

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if value[0] == "again":
            return self._made[value[1]]
        made = self._tagged(*value)
        self._made.append(made)
        return made

    def _tagged(self, tag: str, *rest: Any) -> Any:
        match tag, rest:
            case (("list" | "tuple" | "set" | "frozenset"), (items,)):
                kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
                return kinds[tag]([self.decode(one) for one in items])
            case "dict", (items,):
                return {self.decode(key): self.decode(one) for key, one in items}
            case (("bytes" | "bytearray"), (data,)):
                return {"bytes": bytes, "bytearray": bytearray}[tag](base64.b64decode(data))
            case "random", (version, words, gauss):
                generator = random.Random()
                generator.setstate((version, tuple(words), gauss))
                return generator
            case "object", (module, name, attributes):
                return self._object(module, name, attributes)
        return self._of_numpy(tag, rest)

    def _of_numpy(self, tag: str, rest: tuple[Any, ...]) -> Any:
        import numpy

        match tag, rest:
            case "array", (dtype, shape, data):
                return numpy.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
            case "scalar", (dtype, data):
                return numpy.frombuffer(base64.b64decode(data), dtype=dtype)[0]
            case "generator", (name, state):
                kinds = (numpy.random.PCG64, numpy.random.MT19937, numpy.random.Philox, numpy.random.SFC64)
                bits = {kind.__name__: kind for kind in kinds}[name]()
                bits.state = self.decode(state)
                return numpy.random.Generator(bits)
        raise NotPlain(f"the recorded state has a {tag!r}, which is not known")

    def _object(self, module: str, name: str, attributes: Mapping[str, Any]) -> object:
        kind = _class_at(module, name)
        if kind is None or not has_plain_class(kind):
            raise NotPlain(f"the recorded state has a {name}, which {module} does not define any more")
        made: object = object.__new__(kind)
        vars(made).update({name: self.decode(one) for name, one in attributes.items()})
        return made


def _class_at(module: str, name: str) -> type | None:
    """Of modules that are loaded."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
