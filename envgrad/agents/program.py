"""A program in any language as an agent: started for one episode, and ended with all that it started."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from envgrad.agents.endpoint import AgentEndpoint, AgentTimeLimit
from envgrad.errors import ConfigurationError, EnvgradError

KEPT = 1 << 20
"""bytes of stdout and stderr that are kept: the last ones"""
_QUOTED = 2000
_UNPROXIED = "127.0.0.1,localhost,::1"


class ProgramFailed(EnvgradError):
    """The program could not be started, or ended with an exit code other than 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What a program left behind."""

    stdout: str
    stderr: str
    returncode: int


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A command that plays an episode through ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.

    It runs in a process group of its own, which is killed on every way out: the program's end, its time limit, the
    episode's, an interrupt, the end of the run. Where this process is killed, the program is too (Linux, where
    ``setpriv`` knows ``--pdeathsig``), but not what it has started itself. Give a program that must not touch this
    machine a sandbox of its own.

    Args:
        command: The program and its first arguments.
        time_limit: Seconds that it may take; None leaves that to ``episode_timeout``.
        environ: Variables beside those of this process and the endpoint's.
        cwd: The folder to run it in.

    Raises:
        ConfigurationError: an empty command, or a time limit that is none.

    Example:
        >>> endpoint = AgentEndpoint(base_url="http://127.0.0.1:9/v1", api_key="k", messages=())
        >>> program = AgentProgram(["sh", "-c", "echo $OPENAI_BASE_URL; cat"])
        >>> asyncio.run(program.run(endpoint, stdin="the task")).stdout
        'http://127.0.0.1:9/v1\\nthe task'
    """

    command: Sequence[str]
    time_limit: float | None = 600.0
    environ: Mapping[str, str] = field(default_factory=dict)
    cwd: str | Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ConfigurationError(f"command={self.command!r} must be a list: the program and its arguments")
        if self.time_limit is not None and not (self.time_limit > 0 and math.isfinite(self.time_limit)):
            raise ConfigurationError(f"time_limit={self.time_limit} must be above 0 seconds; None is no limit")

    async def run(self, endpoint: AgentEndpoint, *arguments: str, stdin: str = "") -> ProgramResult:
        """Run the program to its end.

        Args:
            endpoint: The episode's, as ``run_agent`` got it.
            arguments: Further arguments of the command.
            stdin: What it can read from its standard input.

        Raises:
            AgentTimeLimit: it ran past ``time_limit``. Let it through: the episode ends as truncated.
            ProgramFailed: it did not end well. Let it through: the episode is retried, unless one of the episode's
                limits had been reached, which then ended it.
        """
        command = [*_end_with_parent(), *self.command, *arguments]
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode())
            given.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=given, stdout=out, stderr=err, cwd=self.cwd, env=self._environ(endpoint),
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ProgramFailed(f"{self.command[0]} cannot be started: {error}") from error
            try:
                async with asyncio.timeout(self.time_limit):
                    returncode = await process.wait()
            except TimeoutError as error:
                raise AgentTimeLimit(f"{self.command[0]} ran past its time limit of {self.time_limit} s") from error
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            result = ProgramResult(stdout=_last(out), stderr=_last(err), returncode=returncode)
        if returncode:
            said = (result.stderr.strip() or result.stdout.strip())[-_QUOTED:]
            raise ProgramFailed(f"{self.command[0]} ended with exit code {returncode}: {said or 'it said nothing'}")
        return result

    def _environ(self, endpoint: AgentEndpoint) -> dict[str, str]:
        environ = {**os.environ, **endpoint.environ, **self.environ}
        for name in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine, whatever proxy leads out of it
            environ[name] = ",".join(filter(None, [environ.get(name), _UNPROXIED]))
        return environ


@functools.cache
def _end_with_parent() -> tuple[str, ...]:
    """What a command begins with so that it is killed when this process is gone, even if that was killed.

    A ``preexec_fn`` would do it too, and would fork the whole trainer for each episode, with all its threads' locks.
    """
    found = shutil.which("setpriv")
    if found is None:
        return ()
    words = (found, "--pdeathsig", "KILL", "--")
    try:
        tried = subprocess.run([*words, found, "--version"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return () if tried.returncode else words


def _last(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - KEPT))
    return file.read().decode("utf-8", "replace")
