"""Frames of JSON over a socket pair: a length in four bytes, then the text. Nothing is ever unpickled."""

from __future__ import annotations

import builtins
import json
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


def decode(data: bytes) -> Message:
    """The message of a frame without its length."""
    message: Message = json.loads(data.decode("utf-8", "surrogatepass"))
    return message


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
    (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
    return decode(_exactly(connection, length))


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
