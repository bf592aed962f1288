"""``Sandbox``: a private workspace, and runs of programs in it that cannot reach anything else."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import cast

from envgrad.environments.boundary import Raised, guard_in_thread
from envgrad.environments.sandbox.command import SYSTEM, WORKSPACE, SandboxSetup, require_sandbox, sandboxed
from envgrad.environments.sandbox.files import (
    copy_in,
    copy_out,
    give,
    give_parents,
    inside,
    prepare_root,
    remove_tree,
    replace_file,
    special_files,
)
from envgrad.environments.sandbox.limits import RunResult, SandboxLimits
from envgrad.environments.sandbox.seccomp import seccomp_filter
from envgrad.environments.sandbox.watching import Stream, wait_within
from envgrad.errors import ConfigurationError, EnvironmentFailure

FIRST_USER = 1_879_048_192
"""users that sandboxes of a root process run as, one each: far from those of people and of other tools"""

_users = itertools.count(os.getpid() % 30_000 * 1_000)


class Sandbox:
    """One episode's workspace, and a way to run model-written programs in it.

    Each run has no network, sees this machine's ``/usr`` read-only, its own ``/tmp`` and ``/workspace``, no other
    process, no environment variables of ours, no capabilities, and the limits given. What it leaves running ends with
    it. The workspace stays between runs, until ``close``. It is bubblewrap underneath: where that cannot work,
    construction fails; nothing is ever run unsandboxed instead. Runs, reads and writes of one sandbox wait for each
    other; ``close`` ends the run in hand.

    What it does not promise: it shares this machine's kernel, so a flaw in the kernel is a way out; programs can tell
    the time and the kind of processor; and memory is looked at every few hundredths of a second, not metered.

    Args:
        limits: Of each run.
        read_only: Path inside -> path here, shown read-only: data, a virtual environment. Where this process is root,
            it must be readable by every user, since programs run as a user of their own.
        variables: Environment variables inside.
        whole: The workspace is the whole file system instead of ``/workspace``: what programs write anywhere stays, and
            they look like root. This machine's ``/usr`` is shown read-only all the same.

    Raises:
        SandboxUnavailable: there is no bubblewrap here, or it may not make namespaces.
        ConfigurationError: a path of ``read_only`` that is not there, or is not absolute inside.

    Example:
        >>> from envgrad.environments.sandbox import Sandbox, unavailable
        >>> class Coder:
        ...     def reset(self, seed):
        ...         self.sandbox = Sandbox()
        ...         return "Write the number 7 to answer.txt."
        ...
        ...     def python(self, code: str) -> str:
        ...         return self.sandbox.run_python(code).text()
        ...
        ...     def get_reward(self):
        ...         return float(self.sandbox.read("answer.txt", default="").strip() == "7")
        ...
        ...     def close(self):
        ...         self.sandbox.close()
        >>> if unavailable() is None:
        ...     coder = Coder()
        ...     _ = coder.reset(seed=1), coder.python("open('answer.txt', 'w').write('7')")
        ...     assert coder.get_reward() == 1.0
        ...     coder.close()
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        read_only: Mapping[str, str | os.PathLike[str]] | None = None,
        variables: Mapping[str, str] | None = None,
        whole: bool = False,
    ) -> None:
        require_sandbox()
        shown = {place: os.path.realpath(outside) for place, outside in (read_only or {}).items()}
        for place, outside in shown.items():
            if not place.startswith("/") or place in ("/", WORKSPACE) or not os.path.exists(outside):
                raise ConfigurationError(
                    f"read_only={{{place!r}: {outside!r}}}: the path inside must be absolute and not the workspace, "
                    "and the path here must exist"
                )
        self.limits = limits or SandboxLimits()
        self._root = Path(os.path.realpath(tempfile.mkdtemp(prefix="envgrad-sandbox-")))
        self._lock = threading.Lock()
        self._closed = False
        self._calls: set[_Call] = set()
        user = FIRST_USER + next(_users) % 30_000_000 if os.geteuid() == 0 else None
        self.workspace = self._root / "workspace"
        self.workspace.mkdir()
        self._setup = SandboxSetup(
            workspace=str(self.workspace), limits=self.limits, user=user, read_only=shown, variables=variables or {},
            whole=whole,
        )  # fmt: skip
        if user is not None:
            os.chmod(self._root, 0o711)
        give(self.workspace, user)

    # -- running

    def run(self, program: Sequence[str], *, stdin: str = "", seconds: float | None = None) -> RunResult:
        """Run a program and wait until it has ended, or a limit has ended it. One run at a time.

        Args:
            program: Its name and arguments.
            stdin: What it reads.
            seconds: A limit below ``limits.seconds`` for this run.

        Raises:
            EnvironmentFailure: the sandbox is closed, or could not be set up.
        """
        return self._run_call(_Call(), program, stdin, self._limits(seconds))

    def _limits(self, seconds: float | None) -> SandboxLimits:
        return self.limits if seconds is None else replace(self.limits, seconds=min(seconds, self.limits.seconds))

    def _run_call(self, call: _Call, program: Sequence[str], stdin: str, limits: SandboxLimits) -> RunResult:
        self._calls.add(call)
        try:
            with self._lock:
                self._check_open()
                if self._setup.whole:
                    prepare_root(self.workspace, (*SYSTEM, *self._setup.read_only), self._setup.user)
                return self._run(call, program, stdin, limits)
        finally:
            self._calls.discard(call)

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFailure("the sandbox is closed")

    def _run(self, call: _Call, program: Sequence[str], stdin: str, limits: SandboxLimits) -> RunResult:
        began = perf_counter()
        code = seccomp_filter()
        reading, writing = os.pipe()
        os.write(writing, code or b"")
        os.close(writing)
        try:
            process = subprocess.Popen(
                sandboxed(self._setup, program, seccomp_fd=reading if code else None),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[reading],
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},  # the namespace's first process shows its own inside
                start_new_session=True,
            )
        finally:
            os.close(reading)
        call.started(process)
        given, out, err = process.stdin, process.stdout, process.stderr
        if given is None or out is None or err is None:
            raise AssertionError("all three streams are pipes")
        try:
            streams = Stream(out, limits.output_bytes), Stream(err, limits.output_bytes)
            feeder = threading.Thread(target=_feed, args=(given, stdin.encode("utf-8", "replace")), daemon=True)
            feeder.start()
            killed = wait_within(process, limits, self._setup.workspace)
        finally:
            process.kill()
            process.wait()
        texts = [stream.text() for stream in streams]
        feeder.join(1.0)
        for stream in (given, out, err):
            with suppress(OSError):
                stream.close()
        status = process.returncode
        if status and texts[1].startswith("bwrap: ") and not texts[0]:
            raise EnvironmentFailure(f"the sandbox could not be set up: {texts[1].strip()}")
        return RunResult(
            stdout=texts[0],
            stderr=texts[1],
            exit_code=128 - status if status < 0 else status,
            killed=killed,
            truncated=any(stream.truncated for stream in streams),
            seconds=perf_counter() - began,
        )

    def run_python(self, code: str, *, stdin: str = "", seconds: float | None = None) -> RunResult:
        """Run Python code with this machine's ``python3``, isolated from the workspace's own modules' start-up."""
        return self.run(["python3", "-I", "-c", code], stdin=stdin, seconds=seconds)

    def run_shell(self, command: str, *, stdin: str = "", seconds: float | None = None) -> RunResult:
        """Run a shell command."""
        return self.run(["sh", "-c", command], stdin=stdin, seconds=seconds)

    async def arun(self, program: Sequence[str], *, stdin: str = "", seconds: float | None = None) -> RunResult:
        """``run`` for async environments: the loop goes on meanwhile, and cancelling this ends the run."""
        call, future = _Call(), Future[RunResult]()

        def work() -> None:
            outcome = guard_in_thread(lambda: self._run_call(call, program, stdin, self._limits(seconds)))
            if isinstance(outcome, Raised):
                future.set_exception(outcome.error)
            else:
                future.set_result(cast(RunResult, outcome.value))

        threading.Thread(target=work, name="envgrad-sandbox-run", daemon=True).start()
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            call.end()
            raise

    # -- files

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file of the workspace, in the place of what is there.

        Raises:
            EnvironmentFailure: a path outside of the workspace, also by a link that a program left there, or one that
                leads through a file.
        """
        with self._lock:
            target = self._target(path)
            replace_file(target, content.encode() if isinstance(content, str) else content)
            give(target, self._setup.user)

    def read(self, path: str, default: str | None = None, *, most_bytes: int = 10_000_000) -> str:
        """A file of the workspace as text; ``default`` if it is not there or is no plain file.

        Raises:
            FileNotFoundError: it is not there, and there is no default.
            EnvironmentFailure: a path outside of the workspace, also by a link that a program left there.
        """
        with self._lock:
            self._check_open()
            target = self._inside(path)
            if not target.is_file():
                if default is None:
                    raise FileNotFoundError(f"the workspace has no file {path!r}")
                return default
            with target.open("rb") as file:
                return file.read(most_bytes).decode("utf-8", "replace")

    def put(self, source: str | os.PathLike[str], path: str) -> None:
        """Copy a file, or the content of a folder, of this machine into the workspace, in the place of what is there.

        Raises:
            EnvironmentFailure: a path outside of the workspace, or one that leads through a file.
        """
        with self._lock:
            copy_in(Path(source), self._target(path), self._setup.user)

    def get(self, path: str, target: str | os.PathLike[str]) -> None:
        """Copy a file, or the content of a folder, of the workspace to this machine. Links are not followed, and stay
        behind, as do pipes and sockets.

        Raises:
            FileNotFoundError: it is not there.
            EnvironmentFailure: a path outside of the workspace, also by a link that a program left there.
        """
        with self._lock:
            self._check_open()
            source = self._inside(path)
            if not source.exists():
                raise FileNotFoundError(f"the workspace has no {path!r}")
            copy_out(source, Path(target))

    def fork(self) -> Sandbox:
        """Another sandbox with a copy of the workspace."""
        with self._lock:
            self._check_open()
            setup = self._setup
            other = Sandbox(self.limits, read_only=setup.read_only, variables=setup.variables, whole=setup.whole)
            shutil.copytree(self.workspace, other.workspace, symlinks=True, dirs_exist_ok=True, ignore=special_files)
            for folder, folders, files in os.walk(other.workspace):
                for name in (*folders, *files):
                    give(Path(folder) / name, other._setup.user)
            return other

    def close(self) -> None:
        """End the run in hand, and remove the workspace. Safe to call twice."""
        self._closed = True
        for call in tuple(self._calls):
            call.end()
        with self._lock:
            remove_tree(self._root)

    def _inside(self, path: str) -> Path:
        whole = self._setup.whole
        return inside(self.workspace, path if whole else path.removeprefix(WORKSPACE), whole=whole)

    def _target(self, path: str) -> Path:
        """Where to write ``path``; the folders above it are made."""
        self._check_open()
        target = self._inside(path)
        above = next(folder for folder in target.parents if folder.exists())
        if not above.is_dir():
            raise EnvironmentFailure(f"{path!r} leads through a file of the workspace")
        target.parent.mkdir(parents=True, exist_ok=True)
        give_parents(target.parent, self.workspace, self._setup.user)
        return target


class _Call:
    """One run, which another thread may end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def started(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self._ended:
            process.kill()

    def end(self) -> None:
        self._ended = True
        if self._process is not None:
            self._process.kill()


def _feed(stream: object, data: bytes) -> None:
    with suppress(BrokenPipeError, OSError, ValueError):
        stream.write(data)  # type: ignore[attr-defined]
        stream.close()  # type: ignore[attr-defined]
