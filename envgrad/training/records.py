"""The flow's records as JSON and tensors, and back: what a checkpoint keeps of samples, batches and groups.

::

    record --RecordWriter--> JSON data + {name: tensor} --RecordReader--> an equal record

Written and read by the records' own type hints, so that every value is checked when it is read; nothing is pickled.
Rows of numbers lie one after another in two tensors, ``ints`` (int64) and ``floats`` (float64, so that they come back
bit for bit); tensors keep their dtype, and one that two fields share is shared again.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from envgrad.errors import CheckpointError, EpisodeFailure
from envgrad.layout import PackedLayout
from envgrad.types import StopReason, Task

INTS, FLOATS = "ints", "floats"

_SKIPPED = {"TrainingSample": ("episode",)}
"""fields that are not kept: they come back as their default"""


class NotPlain(Exception):
    """A value of the user's is no plain JSON data, so that it would not come back as it is."""


class RecordWriter:
    """Collects records; ``tensors()`` is what the JSON data refers to.

    Example:
        >>> from envgrad.types import EpisodeRow
        >>> row = EpisodeRow(token_ids=(5, 6), mask=(0, 1), logprobs=(0.0, -0.1), versions=(-1, 0), prompt_length=1)
        >>> writer = RecordWriter()
        >>> data = writer.write(EpisodeRow, row)
        >>> data["token_ids"], data["prompt_length"], writer.tensors()["ints"].tolist()
        ([0, 2], 1, [5, 6, 0, 1, -1, 0])
        >>> RecordReader(writer.tensors()).read(EpisodeRow, data) == row
        True
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        """tasks that records refer to, by index; who writes them says how they come back"""
        self._task_index: dict[str, int] = {}
        self._ints: list[int] = []
        self._floats: list[float] = []
        self._named: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def write(self, hint: Any, value: Any) -> Any:
        """``value``, which is of type ``hint``, as JSON data.

        Raises:
            NotPlain: a field that may hold anything (messages, arguments of calls) holds what JSON does not.
        """
        hint, optional = _unwrap(hint)
        if value is None and (optional or hint is Any):
            return None
        if hint is Task:
            return self._task(value)
        if hint is Tensor:
            return self._tensor(value)
        if hint is PackedLayout:
            return [{"prefix": prefix, "own": list(own)} for prefix, own in value.families]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return {name: self.write(kind, getattr(value, name)) for name, kind in _fields(hint).items()}
        if hint is BaseException:
            return {"kind": getattr(value, "kind", EpisodeFailure.kind), "text": str(value)}
        return self._plain_or_rows(hint, value)

    def _plain_or_rows(self, hint: Any, value: Any) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is tuple:
            if arguments[0] in (int, float):
                return self._row(self._ints if arguments[0] is int else self._floats, value)
            return [self.write(arguments[0], item) for item in value]
        if origin in (Mapping, dict):
            if not all(isinstance(key, str) for key in value):
                raise NotPlain(f"a key among {list(value)!r} is no string")
            return {key: self.write(arguments[1], item) for key, item in value.items()}
        if hint is Any:
            return plain(value)
        if hint is StopReason:
            return str(value)
        if hint is float:
            return float(value)
        if hint in (int, bool, str):
            return hint(value)
        raise AssertionError(f"no way to write a {hint}")

    def _row(self, column: list[Any], value: Sequence[Any]) -> list[int]:
        start = len(column)
        column.extend(value)
        return [start, len(value)]

    def _task(self, task: Task) -> int:
        if task.key not in self._task_index:
            self._task_index[task.key] = len(self.tasks)
            self.tasks.append(task)
        return self._task_index[task.key]

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            name = f"tensor{len(self._names)}"
            self._names[id(tensor)] = name
            self._kept.append(tensor)  # so that its id stays its own
            self._named[name] = tensor.detach().cpu().contiguous().clone()
        return self._names[id(tensor)]

    def tensors(self) -> dict[str, Tensor]:
        rows = {
            INTS: torch.tensor(self._ints, dtype=torch.int64),
            FLOATS: torch.tensor(self._floats, dtype=torch.float64),
        }
        return self._named | rows


class RecordReader:
    """Reads what a ``RecordWriter`` wrote. ``tasks``: what indices of tasks stand for."""

    def __init__(self, tensors: Mapping[str, Tensor], tasks: Sequence[Task] = ()) -> None:
        self._tensors = tensors
        self._tasks = tasks
        self._ints: list[int] = _column(tensors, INTS, torch.int64)
        self._floats: list[float] = _column(tensors, FLOATS, torch.float64)

    def read(self, hint: Any, data: Any, where: str = "record") -> Any:
        """The value of type ``hint``.

        Raises:
            CheckpointError: ``data`` is not what was written; names the place.
        """
        hint, optional = _unwrap(hint)
        if data is None and (optional or hint is Any):
            return None
        if hint is Task:
            return _item(self._tasks, data, where)
        if hint is Tensor:
            return self._tensor(data, where)
        if hint is PackedLayout:
            return self._layout(data, where)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._record(hint, data, where)
        if hint is BaseException:
            return self._failure(data, where)
        return self._plain_or_rows(hint, data, where)

    def _record(self, hint: Any, data: Any, where: str) -> Any:
        kinds = _fields(hint)
        check_keys(data, kinds, where)
        values = {name: self.read(kind, data[name], f"{where}.{name}") for name, kind in kinds.items()}
        try:
            return hint(**values)
        except AssertionError as error:
            raise CheckpointError(f"{where} is no {hint.__name__}: {error}; the file is damaged") from error

    def _plain_or_rows(self, hint: Any, data: Any, where: str) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is tuple:
            if arguments[0] in (int, float):
                return self._row(self._ints if arguments[0] is int else self._floats, data, where)
            items = expect(data, list, where)
            return tuple(self.read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
        if origin in (Mapping, dict):
            items = expect(data, dict, where)
            return {key: self.read(arguments[1], item, f"{where}.{key}") for key, item in items.items()}
        if hint is Any:
            return data
        if hint is StopReason:
            if not isinstance(data, str) or data not in set(StopReason):
                raise CheckpointError(f"{where}={data!r} is no stop reason of this version; the file is damaged")
            return StopReason(data)
        if hint is float:
            return float(expect(data, (int, float), where))
        return expect(data, hint, where)

    def _row(self, column: Sequence[Any], data: Any, where: str) -> tuple[Any, ...]:
        start, length = _pair(data, where)
        if start + length > len(column):
            raise CheckpointError(f"{where} ends at {start + length} of {len(column)} numbers; the file is damaged")
        return tuple(column[start : start + length])

    def _tensor(self, data: Any, where: str) -> Tensor:
        if not isinstance(data, str) or data not in self._tensors:
            raise CheckpointError(f"{where}={data!r} is none of the file's tensors; the file is damaged")
        return self._tensors[data]

    def _layout(self, data: Any, where: str) -> PackedLayout:
        families = []
        for index, item in enumerate(expect(data, list, where)):
            place = f"{where}[{index}]"
            check_keys(item, ("prefix", "own"), place)
            lengths = [count(length, place) for length in expect(item["own"], list, place)]
            families.append((count(item["prefix"], place), tuple(lengths)))
        return PackedLayout.build(families)

    def _failure(self, data: Any, where: str) -> EpisodeFailure:
        check_keys(data, ("kind", "text"), where)
        kind, text = expect(data["kind"], str, where), expect(data["text"], str, where)
        for known in EpisodeFailure.__subclasses__():
            if known.kind == kind:
                return known(text)
        return EpisodeFailure(text)


def plain(value: Any) -> Any:
    """``value``, if JSON gives it back as it is (tuples as lists).

    Raises:
        NotPlain: it does not.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    raise NotPlain(f"{value!r} is a {type(value).__name__}")


def expect(data: Any, kind: Any, where: str) -> Any:
    """``data``, if it is of ``kind``; True is no number.

    Raises:
        CheckpointError: it is not.
    """
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        wanted = getattr(kind, "__name__", "number")
        raise CheckpointError(f"{where} is a {type(data).__name__}, and must be a {wanted}; the file is damaged")
    return data


def count(data: Any, where: str) -> int:
    """
    Raises:
        CheckpointError: ``data`` is no integer of at least 0.
    """
    number: int = expect(data, int, where)
    if number < 0:
        raise CheckpointError(f"{where} is {number}, and must be at least 0; the file is damaged")
    return number


def check_keys(data: Any, keys: Mapping[str, Any] | Sequence[str], where: str) -> None:
    """
    Raises:
        CheckpointError: ``data`` is no mapping with exactly these keys.
    """
    expect(data, dict, where)
    if set(data) != set(keys):
        missing, unknown = sorted(set(keys) - set(data)), sorted(set(data) - set(keys))
        raise CheckpointError(
            f"{where} lacks {missing} and has {unknown} too many; it was written by another version, or is damaged"
        )


def _pair(data: Any, where: str) -> tuple[int, int]:
    if not isinstance(data, list) or len(data) != 2:
        raise CheckpointError(f"{where} is {type(data).__name__}, and must be [start, length]; the file is damaged")
    return count(data[0], where), count(data[1], where)


def _item(items: Sequence[Task], data: Any, where: str) -> Task:
    if count(data, where) >= len(items):
        raise CheckpointError(f"{where} is task {data} of {len(items)}; the file is damaged")
    return items[int(data)]


def _column(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> list[Any]:
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != dtype or tensor.dim() != 1:
        raise CheckpointError(f"the file has no row of numbers {name!r} of {dtype}; it is foreign or damaged")
    numbers: list[Any] = tensor.tolist()
    return numbers


def _unwrap(hint: Any) -> tuple[Any, bool]:
    """A hint without its None, and whether it had one."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [one for one in get_args(hint) if one is not type(None)]
        if len(inner) != 1:
            raise AssertionError(f"no way to write a {hint}")
        return inner[0], True
    return hint, False


@cache
def _fields(record: type) -> dict[str, Any]:
    hints = get_type_hints(record)
    skipped = _SKIPPED.get(record.__name__, ())
    return {one.name: hints[one.name] for one in dataclasses.fields(record) if one.name not in skipped}
