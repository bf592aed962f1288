"""Frames of JSON over a socket pair: a length in four bytes, then the text.

What an environment's process says is JSON, and nothing of it is ever unpickled. The other way round, a process of this
same Python that was started from here gets its factory and what ``reset`` is given pickled (``pack``): rows may hold
dates or bytes.
"""

from __future__ import annotations

import base64
import builtins
import json
import pickle
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

from envgrad.errors import EnvironmentContractError, EnvironmentFailure

Message: TypeAlias = dict[str, Any]

HEADER = struct.Struct(">I")
MAX_BYTES = 256 * 2**20
"""of one frame; a longer one is an error on the side that would send it"""


class Closed(ConnectionError):
    """The other side is gone."""


def encode(message: Mapping[str, object], what: str) -> bytes:
    """A frame.

    Raises:
        EnvironmentFailure: something in it that JSON cannot carry, or too much; ``what`` names it.

    Example:
        >>> encode({"op": "reset"}, "reset's arguments")[4:]
        b'{"op": "reset"}'
    """
    try:
        data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(
            f"{what} cannot go to another process, which takes what JSON can carry (strings, numbers, lists, dicts): "
            f"{error}"
        ) from error
    if len(data) > MAX_BYTES:
        raise EnvironmentFailure(f"{what} has {len(data)} bytes; at most {MAX_BYTES} go to another process at once")
    return HEADER.pack(len(data)) + data


def pack(value: object, what: str) -> Message:
    """``value`` for a process of this Python that was started here: as JSON where that keeps it, else pickled.

    Raises:
        EnvironmentFailure: it cannot be pickled; ``what`` names it.

    Example:
        >>> pack({"level": 3}, "reset's arguments"), unpack(pack({"at": (1, 2)}, "reset's arguments"))
        ({'plain': {'level': 3}}, {'at': (1, 2)})
    """
    try:
        plain = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        plain = None
    if plain is not None and _same(plain, value):
        return {"plain": plain}
    try:
        pickled = pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise EnvironmentFailure(f"{what} cannot go to another process: {error}") from error
    return {"pickled": base64.b64encode(pickled).decode()}


def unpack(packed: Message) -> Any:
    """What was packed, on the side that was started by the other one."""
    return packed["plain"] if "plain" in packed else pickle.loads(base64.b64decode(packed["pickled"]))


def _same(plain: object, value: object) -> bool:
    """Whether JSON has kept ``value``, types included."""
    if type(plain) is not type(value):
        return False
    if isinstance(plain, dict) and isinstance(value, dict):
        return plain.keys() == value.keys() and all(_same(item, value[key]) for key, item in plain.items())
    if isinstance(plain, list) and isinstance(value, list):
        return all(_same(one, other) for one, other in zip(plain, value, strict=True))
    return plain == value or plain != plain


def decode(data: bytes) -> Message:
    """The message of a frame without its length."""
    message: Message = json.loads(data.decode("utf-8", "surrogatepass"))
    return message


def is_readable(connection: socket.socket, seconds: float | None) -> bool:
    """Whether something comes, or the end, within ``seconds``. Unlike ``select``, of any number of open files."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def send(connection: socket.socket, frame: bytes) -> None:
    """Send a frame on a blocking socket.

    Raises:
        Closed: the other side is gone.
    """
    try:
        connection.sendall(frame)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed("the other side is gone") from error


def receive(connection: socket.socket) -> Message:
    """Wait for a frame on a blocking socket.

    Raises:
        Closed: the other side is gone.
        TimeoutError: past the socket's time-out.
    """
    return decode(receive_bytes(connection))


def receive_bytes(connection: socket.socket) -> bytes:
    """``receive``, of a frame that is no JSON."""
    (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 2**20))
        except ConnectionResetError as error:
            raise Closed("the other side is gone") from error
        if not part:
            raise Closed("the other side is gone")
        parts += part
    return bytes(parts)


def describe_error(error: BaseException) -> Message:
    """An exception as it goes over the wire: its type's name, its text, and whether it is one of the contract's."""
    kinds = ((EnvironmentContractError, "contract"), (EnvironmentFailure, "failure"))
    kind = next((name for cls, name in kinds if isinstance(error, cls)), "other")
    notes = error.__notes__ if hasattr(error, "__notes__") else []
    return {"type": type(error).__name__, "text": str(error), "kind": kind, "notes": list(notes)}


def rebuild_error(described: Mapping[str, Any]) -> Exception:
    """The exception on this side: the contract's own, a built-in one, or one of the same name.

    Example:
        >>> rebuild_error({"type": "KeyError", "text": "'n'", "kind": "other", "notes": []})
        KeyError("'n'")
        >>> rebuild_error({"type": "GameError", "text": "no board", "kind": "other", "notes": []})
        GameError('no board')
    """
    name, text = str(described["type"]), str(described["text"])
    if described["kind"] == "contract":
        return EnvironmentContractError(text)
    if described["kind"] == "failure":
        return EnvironmentFailure(text)
    known = getattr(builtins, name, None)
    kind = known if isinstance(known, type) and issubclass(known, Exception) else type(name, (Exception,), {})
    error: Exception
    try:
        error = kind(text)
    except TypeError:  # one that wants more arguments, as UnicodeDecodeError does
        error = type(name, (Exception,), {})(text)
    for note in described["notes"]:
        error.add_note(str(note))
    return error
