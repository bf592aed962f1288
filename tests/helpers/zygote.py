"""Runs scenarios in processes of their own without paying for the imports each time.

One process imports everything and then forks for each scenario; it has no threads, so that the fork is clean. What a
scenario prints, its exit code, and what it leaves behind are seen from outside, as of any program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parents[1]


@dataclass(slots=True)
class Scenario:
    """A running scenario."""

    pid: int
    folder: Path
    replies: IO[bytes]
    """not buffered, so that what can be read is seen by select"""

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Until it has printed ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.stdout:
            if time.monotonic() > deadline or not alive(self.pid):
                raise AssertionError(f"never said {text!r}:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.005)

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def finish(self, seconds: float = 60.0) -> int:
        """Its exit code, as ``subprocess`` tells it; it must end within ``seconds``."""
        ready = _readable(self.replies, seconds)
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
            self.replies.readline()
            raise AssertionError(f"still running after {seconds} s:\n{self.stdout}\n{self.stderr}")
        return int(json.loads(self.replies.readline())["code"])


def _readable(stream: IO[bytes], seconds: float) -> bool:
    import select

    return bool(select.select([stream], [], [], seconds)[0])


def alive(pid: int) -> bool:
    """Whether the process is there, and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether the process ends within ``seconds``."""
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Zygote:
    """Starts scenarios: functions ``name(folder, *words)`` of a module, one at a time."""

    _running: int | None = None

    def __init__(self, module: str) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env
        )

    def start(self, name: str, folder: Path, *words: str) -> Scenario:
        assert self._process.stdin is not None and self._process.stdout is not None
        for stream in ("stdout", "stderr"):
            (folder / stream).touch()
        request = json.dumps({"name": name, "folder": str(folder), "words": words}) + "\n"
        self._process.stdin.write(request.encode())
        pid = int(json.loads(self._process.stdout.readline())["pid"])
        self._running = pid
        return Scenario(pid, folder, self._process.stdout)

    def run(self, name: str, folder: Path, *words: str, seconds: float = 60.0) -> tuple[int, Scenario]:
        scenario = self.start(name, folder, *words)
        return scenario.finish(seconds), scenario

    def close(self) -> None:
        assert self._process.stdin is not None
        if self._running is not None and alive(self._running):  # a test gave it up
            os.killpg(self._running, signal.SIGKILL)
        self._process.stdin.close()
        self._process.wait(60)  # its interpreter is large, and the machine may be busy


def _serve(module: str) -> None:
    import importlib

    scenarios = importlib.import_module(module)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(scenarios, request["name"], Path(request["folder"]), request["words"])
        print(json.dumps({"pid": pid}), file=replies)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=replies)


def _become(scenarios: object, name: str, folder: Path, words: list[str]) -> None:
    """As a script that does this alone: uncaught errors are shown by the interpreter, and decide the exit code."""
    for number, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    sys.stdin.close()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
    os.chdir(folder)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    raise _Go(getattr(scenarios, name), folder, words)


class _Go(BaseException):
    """Carries what is to be run out of the server's loop."""


if __name__ == "__main__":
    try:
        _serve(sys.argv[1])
    except _Go as go:
        run, folder, words = go.args
    else:
        sys.exit(0)
    run(folder, *words)
