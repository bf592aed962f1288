"""The process that samples, started by ``process_link``: ``python -m ...process_child SOCKET PARENT [lasting]``.

::

    socket --> asyncio loop (main thread): frames, in order --> LocalSampler (a thread of its own)
           <-- answers, beats                              <--

It ends with its parent, however that ends: by the stream's end, by the system's signal, or because it has another
parent than before. It leaves by ``os._exit``: it owns nothing that needs to be put away.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from envgrad.environments.boundary import Raised, guard
from envgrad.errors import ConfigurationError, SamplerFailure, WeightTransferError
from envgrad.sampling.process_frames import (
    Frame,
    FrameError,
    FrameReader,
    completion_frame,
    read_params,
    read_session,
    receive_frames,
    send_frame,
)

if TYPE_CHECKING:
    from envgrad.rollout.activity import Activity
    from envgrad.sampling.generate import GenerateSampler
    from envgrad.sampling.local import LocalSampler
    from envgrad.sampling.sampler import Completion

BEAT_SECONDS = 1.0
"""between two signs of life"""
ORPHAN_SECONDS = 0.5
"""between two looks whether the parent lives"""
_PARENT_IS_GONE = 3
_SEND_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def serve(sock: socket.socket) -> None:
    """Answer what comes through ``sock`` until it ends or says close; what cannot be survived is reported there."""
    reader = FrameReader()
    outcome = guard(_serve, sock, reader)
    if isinstance(outcome, Raised):
        report_failure(sock, outcome.error)


def report_failure(sock: socket.socket, error: BaseException) -> None:
    """Tell the parent why, and end the process."""
    text = "".join(traceback.format_exception(error))
    kind = "refused" if isinstance(error, ConfigurationError) else "failed"
    with suppress(OSError):  # nobody listens any more
        sock.settimeout(_SEND_SECONDS)
        send_frame(sock, Frame(kind=kind, data={"error": _words(error), "text": text}))
    os._exit(1)


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"


def _serve(sock: socket.socket, reader: FrameReader) -> None:
    frames: list[Frame] = []
    while not frames:
        received = receive_frames(sock, reader)
        if received is None:
            return
        frames += received
    start, *rest = frames
    sampler, activity = _make_sampler(start)
    asyncio.run(_Server(sock, reader, sampler, activity).run(rest))


def _make_sampler(start: Frame) -> tuple[LocalSampler | GenerateSampler, Activity]:
    import torch

    from envgrad.rollout.activity import Activity
    from envgrad.sampling.local import make_local_sampler
    from envgrad.sampling.process_model import build_model, build_tokenizer
    from envgrad.sampling.process_weights import read_weights

    data, file = start.data, _file_of(start)
    torch.set_num_threads(data["threads"])
    torch.set_float32_matmul_precision(data["matmul_precision"])
    try:
        model = build_model(data["model"], read_weights(file, data["weights"]))
    finally:
        os.close(file)
    activity = Activity()
    sampler = make_local_sampler(
        model,
        **data["options"],
        autocast=None if data["autocast"] is None else getattr(torch, data["autocast"]),
        tokenizer=build_tokenizer(data["tokenizer"]),
        activity=activity,
        threads=data["threads"],
    )
    sampler.update_weights(data["weights"]["version"], None)
    return sampler, activity


def _file_of(frame: Frame) -> int:
    if frame.file is None:
        raise WeightTransferError(f"a {frame.kind!r} frame came without its file of weights")
    return frame.file


class _Server:
    """Hands frames to the sampler in the order they came, and its answers back. All in the loop's thread."""

    def __init__(
        self, sock: socket.socket, reader: FrameReader, sampler: LocalSampler | GenerateSampler, activity: Activity
    ) -> None:
        self._socket = sock
        self._reader = reader
        self._sampler = sampler
        self._activity = activity
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._asked: dict[int, asyncio.Task[Completion]] = {}
        self._updates: set[asyncio.Task[None]] = set()

    async def run(self, frames: list[Frame]) -> None:
        loop = asyncio.get_running_loop()
        for early in frames:
            self._frames.put_nowait(early)
        loop.add_reader(self._socket.fileno(), self._receive)
        self._send(Frame(kind="ready", data={"sampler": type(self._sampler).__name__}))
        beat = asyncio.create_task(self._beat())
        while (frame := await self._frames.get()) is not None and frame.kind != "close":
            self._handle(frame)
            # A request or its end begins to act when its task first runs; the next frame comes behind that.
            await asyncio.sleep(0)
        beat.cancel()

    def _receive(self) -> None:
        try:
            frames = receive_frames(self._socket, self._reader)
        except ConnectionError:
            frames = None
        except FrameError as error:
            report_failure(self._socket, error)
            return
        for frame in [None] if frames is None else frames:
            self._frames.put_nowait(frame)

    def _send(self, frame: Frame) -> None:
        # Waits while the parent is stopped; if it ends, so does this process (``end_with``).
        with suppress(ConnectionError):  # the stream's end is seen where it is read
            send_frame(self._socket, frame)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._send(Frame(kind="beat", data=self._news()))

    def _news(self) -> dict[str, Any]:
        """What the sampler has done since the last frame that told."""
        spans = [[one.kind, one.start, one.end, one.tokens] for one in self._activity.take()]
        return {"spans": spans, "stats": self._sampler.stats.as_dict()}

    def _handle(self, frame: Frame) -> None:
        data = frame.data
        if frame.kind == "begin":
            self._sampler.begin(read_session(data))
        elif frame.kind == "end":
            self._sampler.end(read_session(data))
        elif frame.kind == "ask":
            self._ask(frame)
        elif frame.kind == "cancel":
            if (task := self._asked.get(data["id"])) is not None:
                task.cancel()
        elif frame.kind == "weights":
            task_of_update = asyncio.create_task(self._update(_file_of(frame), data))
            self._updates.add(task_of_update)
            task_of_update.add_done_callback(self._updated)
        else:
            raise ValueError(f"frame of kind {frame.kind!r}")

    def _ask(self, frame: Frame) -> None:
        prompt_ids, number = [int(one) for one in frame.columns[0]], frame.data["id"]
        answer = self._sampler.sample(
            prompt_ids, read_params(frame.data["params"]), read_session(frame.data["session"])
        )
        task = self._asked[number] = asyncio.create_task(answer)
        task.add_done_callback(partial(self._answered, number))

    def _answered(self, number: int, task: asyncio.Task[Completion]) -> None:
        del self._asked[number]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send(completion_frame(number, task.result(), self._news()))
        elif isinstance(error, SamplerFailure | ConfigurationError):
            self._refuse(number, error)
        else:  # the engine's own: it answers nothing any more
            report_failure(self._socket, error)

    def _refuse(self, number: int, error: BaseException) -> None:
        self._send(Frame(kind="error", data={"id": number, "type": type(error).__name__, "text": str(error)}))

    async def _update(self, file: int, data: Mapping[str, Any]) -> None:
        """Load in another thread; the engine goes on until the weights are here, and takes them between two steps."""
        from envgrad.sampling.process_weights import read_weights

        def load() -> None:
            try:
                self._sampler.update_weights(data["weights"]["version"], read_weights(file, data["weights"]))
            finally:
                os.close(file)

        try:
            await asyncio.to_thread(load)
        except (ConfigurationError, WeightTransferError) as error:
            self._refuse(data["id"], error)
        else:
            self._send(Frame(kind="loaded", data={"id": data["id"]}))

    def _updated(self, task: asyncio.Task[None]) -> None:
        self._updates.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report_failure(self._socket, error)


def end_with(parent: int, *, lasting: bool) -> None:
    """End this process when ``parent`` does. ``lasting``: the thread that started this process lasts as long."""
    if sys.platform == "linux" and lasting:  # the system tells of the end of that thread
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_SECONDS)
        os._exit(_PARENT_IS_GONE)

    threading.Thread(target=watch, name="envgrad-parent-watch", daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv[2]), lasting="lasting" in sys.argv[3:])
    faulthandler.enable()
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
