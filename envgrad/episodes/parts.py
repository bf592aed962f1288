"""Whole episodes in Parquet files, the parts of a log: ``part-000007.parquet`` holds episodes ``first`` to ``last``.

A part appears under its name when it is whole: it is written beside it and moved. Rows are in the order of their
numbers, without gaps, so that an episode's place follows from its number.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from envgrad.environments.boundary import Ok, guard

if TYPE_CHECKING:
    import pyarrow

FlatRow: TypeAlias = dict[str, Any]
"""one episode as columns (``COLUMNS``, ``TOKEN_COLUMNS``)"""

FORMAT = 2
"""of parts and index; a reader of another format says so"""
ROWS_TOGETHER = 128
"""episodes in a row group, which is what reading one episode decodes"""
SUFFIX = ".parquet"

COLUMNS = {
    "number": "int64",
    "group": "int64",
    "step": "int64",
    "split": "string",
    "environment": "string",
    "position": "int64",
    "task_index": "int64",
    "epoch": "int64",
    "group_id": "int64",
    "seed": "int64",
    "sibling": "int32",
    "part": "string",
    "attempt": "int32",
    "use": "string",
    "reward": "float64",
    "rewards": "string",
    "advantage": "float64",
    "stop_reason": "string",
    "failed": "string",
    "error": "string",
    "truncated": "bool",
    "turns": "int32",
    "prompt_tokens": "int32",
    "sampled_tokens": "int32",
    "seconds": "float64",
    "first_version": "int64",
    "last_version": "int64",
    "body": "string",
    "tools": "string",
    "row": "string",
    "row_is_exact": "bool",
    "start": "string",
}
"""JSON text where the value is no scalar; ``body`` holds messages, turns and all else that is read with them"""

TOKEN_COLUMNS = {
    "token_ids": ("i", "int32"),
    "mask": ("b", "int8"),
    "logprobs": ("f", "float32"),
    "versions": ("i", "int32"),
    "advantages": ("f", "float32"),
    "trainer_logprobs": ("f", "float32"),
    "row_lengths": ("i", "int32"),
    "prompt_lengths": ("i", "int32"),
}
"""all rows of an episode behind each other, cut by ``row_lengths``; None or a sequence of numbers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file."""

    name: str
    first: int
    last: int
    size: int
    """bytes"""

    @property
    def episodes(self) -> int:
        return self.last - self.first + 1


def part_name(serial: int) -> str:
    """
    >>> part_name(7)
    'part-000007.parquet'
    """
    return f"part-{serial:06d}{SUFFIX}"


def serial_of(name: str) -> int:
    """
    >>> serial_of("part-000007.parquet")
    7
    """
    return int(name.removeprefix("part-").removesuffix(SUFFIX))


def part_files(folder: Path) -> list[Path]:
    """The parts that lie in ``folder``, in order; half-written ones have another name."""
    return sorted(path for path in folder.glob(f"part-*{SUFFIX}") if path.stem.removeprefix("part-").isdigit())


def write_part(path: Path, rows: Sequence[FlatRow]) -> Part:
    """Write ``rows``, whose numbers follow one another, under ``path``, all or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.array([row[name] for row in rows], pa.type_for_alias(kind)) for name, kind in COLUMNS.items()}
    columns |= {name: _lists([row[name] for row in rows], kind) for name, (_, kind) in TOKEN_COLUMNS.items()}
    first, last = rows[0]["number"], rows[-1]["number"]
    facts = {"format": str(FORMAT), "first": str(first), "last": str(last)}
    beside = path.with_name(path.name + ".tmp")
    pq.write_table(
        pa.table(columns).replace_schema_metadata(facts),
        beside,
        compression="zstd",
        compression_level=1,
        row_group_size=ROWS_TOGETHER,
        use_dictionary=["split", "environment", "use", "stop_reason", "failed", "tools", "row"],
        write_statistics=False,
    )
    beside.replace(path)
    pa.default_memory_pool().release_unused()
    return Part(name=path.name, first=first, last=last, size=path.stat().st_size)


def _lists(values: Sequence[bytes | None], kind: str) -> pyarrow.Array:
    """A list column of ``packed`` numbers, which pyarrow takes as they are."""
    import pyarrow as pa

    flat = b"".join([value for value in values if value is not None])
    item = pa.type_for_alias(kind)
    width = item.bit_width // 8
    offsets = list(accumulate((len(value or ()) // width for value in values), initial=0))
    items = pa.Array.from_buffers(item, offsets[-1], [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), items, mask=pa.array([value is None for value in values], pa.bool_())
    )


def packed(name: str, values: Sequence[float] | None) -> bytes | None:
    """A token column's numbers as bytes, which is how they lie before they are in a part.

    >>> packed("mask", [0, 1, 1])
    b'\\x00\\x01\\x01'
    """
    return None if values is None else array(TOKEN_COLUMNS[name][0], values).tobytes()


def unpacked(name: str, data: bytes | None) -> array[float] | None:
    """
    >>> unpacked("token_ids", packed("token_ids", [5, 6]))
    array('i', [5, 6])
    """
    if data is None:
        return None
    numbers: array[float] = array(TOKEN_COLUMNS[name][0])
    numbers.frombytes(data)
    return numbers


def part_facts(path: Path) -> Part | None:
    """What a part says of itself; None if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        facts = pq.read_schema(path).metadata or {}
        if facts[b"format"] != str(FORMAT).encode():
            return None
        return Part(name=path.name, first=int(facts[b"first"]), last=int(facts[b"last"]), size=path.stat().st_size)
    except (OSError, KeyError, ValueError, pa.ArrowException):
        return None


def read_rows(
    path: Path, places: Sequence[int] | None = None, columns: Sequence[str] | None = None
) -> Iterator[FlatRow]:
    """The rows of a part, all or those at ``places`` (ascending).

    Raises:
        OSError: the part is not there, or broken.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        begin, left = 0, None if places is None else list(places)
        for index in range(file.num_row_groups):
            end = begin + file.metadata.row_group(index).num_rows
            if left is None:
                yield from file.read_row_group(index, columns=columns, use_threads=False).to_pylist()
            elif left and left[0] < end:
                table = file.read_row_group(index, columns=columns, use_threads=False)
                while left and left[0] < end:
                    yield from table.slice(left.pop(0) - begin, 1).to_pylist()
            begin = end


def as_json(value: object) -> str:
    """``value`` as JSON text; what JSON does not hold becomes its text.

    >>> as_json({"lone": chr(0xD800), "path": Path("x"), (1, 2): None})
    '{"lone":"\\\\ud800","path":"x","(1, 2)":null}'
    """
    try:
        text = _JSON.encode(value)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, and what holds itself
        text = _JSON.encode(_plain(value, 0))
    # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: object, depth: int) -> object:
    if depth > _DEEPEST:
        return _text(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _text(key): _plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, depth + 1) for one in value]
    return value


def _text(value: object) -> str:
    """``str`` of what may be a user's own object, whose ``__str__`` may raise."""
    match guard(str, value):
        case Ok(value=str(text)):
            return text
    return f"<{type(value).__name__}>"


_JSON = json.JSONEncoder(ensure_ascii=False, default=_text, separators=(",", ":"))
_DEEPEST = 50
