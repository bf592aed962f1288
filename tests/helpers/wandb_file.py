"""Reads what wandb's offline mode writes: records in LevelDB's log format, each a protocol buffer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32 * 1024


def records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    whole, at = b"", HEADER
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if not kind:
            break
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # the whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, entry by entry."""
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def exit_codes(path: Path) -> list[int]:
    return [one.exit.exit_code for one in records(path) if one.WhichOneof("record_type") == "exit"]
