"""The trainer's end of a sampler's process: its start, its socket, its signs of life, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from envgrad.environments.boundary import Raised, guard
from envgrad.errors import ConfigurationError, EnvgradError, SamplerDied, SamplerFailure
from envgrad.sampling.process_frames import Frame, FrameReader, receive_frames, send_frame

POLL_SECONDS = 1.0
"""between two looks whether the process lives, while it says nothing"""
SILENT_POLLS = 60
"""looks in a row at a process that lives and says nothing, before it is given up. Counted, so that time in which this
process was stopped is none."""
SEND_SECONDS = 30.0
"""the process has to take what is sent to it"""
END_SECONDS = 5.0
"""the process has to end, once it was told to or has closed its socket; then it is killed"""


class ProcessLink:
    """A child process and the frames to and from it.

    Args:
        threads: of the child's computations.
        on_frames: gets what arrives, in the reading thread.
        on_end: gets the reason when nothing will arrive any more, in the reading thread, once.
    """

    def __init__(
        self, *, threads: int, on_frames: Callable[[list[Frame]], None], on_end: Callable[[EnvgradError], None]
    ) -> None:
        self._on_frames = on_frames
        self._on_end = on_end
        self._report: Frame | None = None
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self.ended = threading.Event()
        """set behind ``on_end``"""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = _start(theirs, threads)
        ours.settimeout(POLL_SECONDS)
        self._socket = ours
        self._out = ours.dup()
        self._out.settimeout(SEND_SECONDS)
        self._thread = threading.Thread(target=self._read, name="envgrad-sampler-process", daemon=True)
        self._thread.start()
        # also at the interpreter's exit
        self._closer = weakref.finalize(self, _end, self.process, self._out, self._thread, self._closing)

    def send(self, frame: Frame) -> None:
        """Send a frame, whole.

        Raises:
            TimeoutError: the process takes nothing.
            OSError: it is gone.
        """
        with self._sending:
            send_frame(self._out, frame)

    def close(self) -> None:
        """End the process and the reading thread. Safe to call twice."""
        self._closer()

    @property
    def reading(self) -> bool:
        """Whether the reading thread lives."""
        return self._thread.is_alive()

    # -- the reading thread

    def _read(self) -> None:
        reader = FrameReader()
        outcome = guard(self._read_all, reader)
        reader.close()
        broken = outcome.error if isinstance(outcome, Raised) else None
        self._on_end(self._reason(broken))
        self.ended.set()
        self._socket.close()

    def _read_all(self, reader: FrameReader) -> None:
        silent = 0
        while silent < SILENT_POLLS:
            try:
                frames = receive_frames(self._socket, reader)
            except TimeoutError:
                silent += 1
                if self.process.poll() is not None:  # a child of its own may still hold its socket
                    return
                continue
            except ConnectionError:
                return
            if frames is None:
                return
            silent = 0
            for frame in frames:
                if frame.kind in ("failed", "refused"):
                    self._report = frame
            self._on_frames(frames)
        raise SamplerDied(
            f"the sampler's process ({self.process.pid}) has given no sign of life for {SILENT_POLLS} looks, "
            f"{POLL_SECONDS:.0f} s apart, though it is there: it is stopped, or hangs. It was ended"
        )

    def _reason(self, broken: Exception | None) -> EnvgradError:
        """Why nothing arrives any more; the process is gone afterwards."""
        if broken is not None:
            self.process.kill()
        code = _wait(self.process)
        if self._closing.is_set():
            return SamplerFailure("the sampler is closed")
        if self._report is not None and self._report.kind == "refused":
            return ConfigurationError(self._report.data["error"])
        if self._report is not None:
            data = self._report.data
            return SamplerDied(f"the sampler's process failed: {data['error']}\n\nThere:\n{data['text']}")
        if broken is not None:
            if isinstance(broken, SamplerDied):
                return broken
            return SamplerDied(f"what the sampler's process says cannot be read: {type(broken).__name__}: {broken}")
        return SamplerDied(f"the sampler's process ({self.process.pid}) is gone: {_epitaph(code)}")


def _start(theirs: socket.socket, threads: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter (never a fork: this process has threads), which imports what this one would."""
    paths = [path or os.getcwd() for path in sys.path]
    lasting = ["lasting"] if threading.current_thread() is threading.main_thread() else []
    module = "envgrad.sampling.process_child"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid()), *lasting],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)},
        process_group=0,  # an interrupt from the keyboard is the trainer's, who ends this process in its time
    )


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; it is killed if it does not end by itself."""
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _epitaph(code: int) -> str:
    if code >= 0:
        return f"it left with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; the system does that when memory is short, or somebody did" if name == "SIGKILL" else ""
    return f"{name} ended it{hint}"


def _end(
    process: subprocess.Popen[bytes], out: socket.socket, thread: threading.Thread, closing: threading.Event
) -> None:
    closing.set()
    with suppress(OSError):
        out.shutdown(socket.SHUT_WR)  # it ends with its stream
    _wait(process)
    out.close()
    if thread is not threading.current_thread():
        thread.join()
