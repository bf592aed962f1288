"""What Harbor imports of ours: a backend that needs no containers, and the agent in whose place the policy acts.

Both are named to Harbor by import path; ``harbor run --environment-import-path
envgrad.environments.adapters.harbor_backend:BubblewrapEnvironment`` works with any agent of its own, too.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envgrad.environments.adapters.harbor_build import BASE_IMAGES, Build, read_build
from envgrad.environments.sandbox import Sandbox, SandboxLimits
from envgrad.environments.sandbox.command import require_sandbox
from envgrad.errors import ConfigurationError

try:
    from harbor.agents.base import BaseAgent
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
except ModuleNotFoundError:  # Python below 3.12, or no harbor: nobody can make one of these then
    BaseAgent = BaseEnvironment = object

TIMED_OUT, KILLED = 124, 137
"""exit codes of a command that a limit has ended, as timeout and the kernel give them"""


class BubblewrapEnvironment(BaseEnvironment):
    """A Harbor environment in a sandbox of bubblewrap: a private file system, no network, limits, no container.

    Programs are this machine's, read-only; a task's Dockerfile may say ``FROM`` a plain base image, ``WORKDIR``,
    ``COPY`` and ``ENV``, and anything that would need a build is refused. There is one user, who looks like root.
    Between commands nothing runs. Tasks never have a network here, whatever they ask for.

    Args:
        images: what ``FROM`` and ``docker_image`` may name.
        memory_mb: of one command, where the task does not say.
        disk_mb: of all files, where the task does not say.
        processes: at once.
        seconds: the longest that any command may take.
    """

    def __init__(
        self,
        *args: Any,
        images: Sequence[str] = BASE_IMAGES,
        memory_mb: int = 2048,
        disk_mb: int = 1024,
        processes: int = 256,
        seconds: float = 900.0,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("mounts"):
            raise ConfigurationError("the bubblewrap backend mounts nothing of this machine; use files of the task")
        self._images = tuple(images)
        self._limits = SandboxLimits(
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            processes=processes,
            seconds=seconds,
            cpu_seconds=max(1, int(seconds)),
            files=100_000,
            output_bytes=1_000_000,
        )
        self._sandbox: Sandbox | None = None
        self._build = Build()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, dynamic_network_policy=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True, fractional_cpus=True)

    @classmethod
    def preflight(cls) -> None:
        """
        Raises:
            SandboxUnavailable: no sandbox can be made on this machine.
        """
        require_sandbox()

    def _validate_definition(self) -> None:
        self._build = read_build(
            Path(self.environment_dir), images=self._images, image=self.task_env_config.docker_image
        )

    async def _apply_network_policy(self, network_policy: object) -> None:
        """There never is a network."""

    async def start(self, force_build: bool) -> None:
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        limits: dict[str, Any] = {name: getattr(self._limits, name) for name in self._limits.__slots__}
        limits["memory_mb"] = self._effective_memory_mb or limits["memory_mb"]
        limits["disk_mb"] = self._effective_storage_mb or limits["disk_mb"]
        sandbox = Sandbox(SandboxLimits(**limits), whole=True, variables=self._build.variables)
        self._sandbox = sandbox
        for copy in self._build.copies:
            sandbox.put(copy.source, copy.target)
        if not (Path(self.environment_dir) / "Dockerfile").exists() and self._enable_environment_dir_upload:
            sandbox.put(self.environment_dir, self._workdir)
        folders = [*self._build.folders, self._workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests"]
        made = sandbox.run(["mkdir", "-p", *dict.fromkeys([*folders, *self._mount_targets()])])
        if not made.ok:
            raise RuntimeError(f"the sandbox could not be filled: {made.text()}")

    @property
    def _workdir(self) -> str:
        return str(self.task_env_config.workdir or self._build.workdir)

    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await asyncio.to_thread(sandbox.close)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        user = self._resolve_user(user)
        if user not in (None, "root", 0, "0"):
            raise ConfigurationError(f"user {user!r}: the bubblewrap backend has one user, root")
        variables = [f"{name}={value}" for name, value in (self._merge_env(env) or {}).items()]
        shell = "bash" if os.path.exists("/usr/bin/bash") else "sh"
        script = f"cd {shlex.quote(cwd or self._workdir)} || exit 1\n{command}"
        done = await self._now().arun(["env", *variables, shell, "-c", script], seconds=timeout_sec)
        if done.killed is None:
            return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.exit_code)
        words = f"{done.stderr}\n[killed: past its limit of {done.killed}]".lstrip("\n")
        return ExecResult(
            stdout=done.stdout, stderr=words, return_code=TIMED_OUT if done.killed == "seconds" else KILLED
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await asyncio.to_thread(self._now().put, source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await asyncio.to_thread(self._now().put, source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await asyncio.to_thread(self._now().get, source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await asyncio.to_thread(self._now().get, source_dir, target_dir)

    def _now(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("the sandbox has not been started, or has been stopped")
        return self._sandbox


@dataclass(slots=True)
class Seat:
    """Where an episode and its trial meet: the trial's agent hands the environment over, and waits."""

    ready: asyncio.Future[Any]
    """the environment, once the trial has prepared it"""
    finished: asyncio.Event = field(default_factory=asyncio.Event)


SEATS: dict[str, Seat] = {}
"""by the key that travels in the trial's configuration; used on one loop only"""


class EpisodeAgent(BaseAgent):
    """Harbor's agent, played from outside: it does nothing until the episode has ended."""

    def __init__(self, *args: Any, seat: str, **kwargs: Any) -> None:
        self._seat = SEATS[seat]
        super().__init__(*args, **kwargs)

    @staticmethod
    def name() -> str:
        return "envgrad"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: object) -> None:
        pass

    async def run(self, instruction: str, environment: object, context: object) -> None:
        self._seat.ready.set_result(environment)
        await self._seat.finished.wait()
