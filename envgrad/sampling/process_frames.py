"""Frames on the socket between a trainer and the process that samples for it.

::

    4 bytes        4 bytes        JSON, UTF-8                              columns, one after the other
    header size    columns size   {"kind": "ask", "columns": [["i", 3]]}   token ids, log-probs, as in memory

Both ends run on one machine, from one installation, and nobody else holds the socket. A frame may carry an open file,
which travels beside its bytes (``SCM_RIGHTS``); nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from envgrad.errors import EnvgradError
from envgrad.sampling.sampler import Completion, SamplingParams, Session

Column: TypeAlias = "array[int] | array[float]"

_SIZES = struct.Struct("<II")
MOST_BYTES = 1 << 28
"""of one frame; more shows that the stream is not one of frames"""
RECEIVE_BYTES = 1 << 18
_FILES_AT_ONCE = 4


class FrameError(EnvgradError, RuntimeError):
    """What came through the socket is no frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message: what it is, plain JSON data, columns of numbers, and an open file if there is one."""

    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """what JSON can hold"""
    columns: tuple[Column, ...] = ()
    file: int | None = None
    """a file descriptor; whoever receives the frame closes it"""

    def encode(self) -> bytes:
        """The frame's bytes, without its file.

        Example:
            >>> frame = Frame(kind="ask", data={"id": 7}, columns=(array("i", [1, 2]), array("d", [0.5])))
            >>> FrameReader().feed(frame.encode()) == [frame]
            True
        """
        shapes = [[column.typecode, len(column)] for column in self.columns]
        header = {"kind": self.kind, "data": self.data, "columns": shapes, "file": self.file is not None}
        text = json.dumps(header).encode()
        body = b"".join(column.tobytes() for column in self.columns)
        return _SIZES.pack(len(text), len(body)) + text + body


class FrameReader:
    """Cuts what arrives into frames, however it was torn on the way."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._files: deque[int] = deque()

    def feed(self, data: bytes, files: Sequence[int] = ()) -> list[Frame]:
        """The frames that are whole now.

        Raises:
            FrameError: this is not a stream of frames.
        """
        self._bytes += data
        self._files += files
        frames = []
        while len(self._bytes) >= _SIZES.size:
            header, body = _SIZES.unpack_from(self._bytes)
            if header + body > MOST_BYTES:
                raise FrameError(f"a frame of {header + body} bytes (most: {MOST_BYTES}): something else was written")
            end = _SIZES.size + header + body
            if len(self._bytes) < end:
                break
            frames.append(self._read(bytes(self._bytes[_SIZES.size : end]), header))
            del self._bytes[:end]
        return frames

    def _read(self, data: bytes, header_size: int) -> Frame:
        try:
            header = json.loads(data[:header_size])
            columns, at = [], header_size
            for typecode, length in header["columns"]:
                column: Column = array(typecode)
                column.frombytes(data[at : at + length * column.itemsize])
                at += length * column.itemsize
                columns.append(column)
            if at != len(data):
                raise FrameError(f"{len(data) - at} bytes of a frame belong to no column")
            file = self._files.popleft() if header["file"] else None
            return Frame(kind=header["kind"], data=header["data"], columns=tuple(columns), file=file)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise FrameError(f"a frame cannot be read: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close files that no frame took."""
        while self._files:
            os.close(self._files.popleft())


def send_frame(sock: socket.socket, frame: Frame) -> None:
    """Write ``frame`` whole. One thread at a time.

    Raises:
        OSError: the other end is gone, or takes nothing within the socket's timeout.
    """
    data = frame.encode()
    if frame.file is not None:
        sent = socket.send_fds(sock, [data], [frame.file])
        data = data[sent:]
    if data:
        sock.sendall(data)


def receive_frames(sock: socket.socket, reader: FrameReader) -> list[Frame] | None:
    """The frames that one read of ``sock`` completes, maybe none; None at the stream's end.

    Raises:
        OSError: nothing came within the socket's timeout, or the connection broke.
        FrameError: this is not a stream of frames.
    """
    data, files, _, _ = socket.recv_fds(sock, RECEIVE_BYTES, _FILES_AT_ONCE)
    if not data:
        return None
    return reader.feed(data, files)


def session_data(session: Session) -> dict[str, Any]:
    return {"key": session.key, "group": session.group, "order": list(session.order)}


def read_session(data: Mapping[str, Any]) -> Session:
    """What ``session_data`` wrote.

    Example:
        >>> session = Session(key="train/0/1", group="train/0", order=(0, 1, 0))
        >>> read_session(session_data(session)) == session
        True
    """
    return Session(key=data["key"], group=data["group"], order=tuple(data["order"]))


def params_data(params: SamplingParams) -> dict[str, Any]:
    return asdict(params)


def read_params(data: Mapping[str, Any]) -> SamplingParams:
    """What ``params_data`` wrote, after its way through JSON.

    Example:
        >>> params = SamplingParams(max_tokens=3, stop_token_ids=(1, 2), stop_strings=("x",), seed=2**63)
        >>> read_params(json.loads(json.dumps(params_data(params)))) == params
        True
    """
    lists = {name: tuple(data[name]) for name in ("stop_token_ids", "stop_strings")}
    return SamplingParams(**{**data, **lists})


def completion_frame(number: int, completion: Completion, data: Mapping[str, Any]) -> Frame:
    """The answer to request ``number``; ``data`` goes with it."""
    columns: list[Column] = [array("i", completion.token_ids), array("d", completion.logprobs)]
    if completion.versions is not None:
        columns.append(array("q", completion.versions))
    facts = {"id": number, "stop_reason": completion.stop_reason, "version": completion.policy_version}
    return Frame(kind="answer", data={**data, **facts}, columns=tuple(columns))


def read_completion(frame: Frame) -> Completion:
    """What ``completion_frame`` wrote, number for number.

    Example:
        >>> completion = Completion(token_ids=(5, 6), logprobs=(-0.1, -1 / 3), stop_reason="stop", policy_version=4,
        ...     versions=(4, 5))
        >>> read_completion(completion_frame(1, completion, {})) == completion
        True
    """
    ids, logprobs, *rest = frame.columns
    return Completion(
        token_ids=tuple(int(one) for one in ids),
        logprobs=tuple(logprobs),
        stop_reason=frame.data["stop_reason"],
        policy_version=frame.data["version"],
        versions=tuple(int(one) for one in rest[0]) if rest else None,
    )
