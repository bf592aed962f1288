"""Harbor's side of an episode: the tasks, and one trial of Harbor's per episode, whose agent is ours.

The trial is Harbor's own from beginning to end: it starts the sandbox, checks its health, hands it to the agent, runs
the verifier where the task wants it, and removes everything. Its agent only waits: meanwhile the policy's tools act on
the sandbox.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from envgrad.environments.boundary import Ok, Raised
from envgrad.environments.closing import call_all_now
from envgrad.errors import ConfigurationError, EnvironmentFailure, first_line

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment
    from harbor.models.trial.result import TrialResult

OURS = "envgrad.environments.adapters.harbor_backend"
BUBBLEWRAP = f"{OURS}:BubblewrapEnvironment"
NO_LIMIT = 10 * 365 * 86_400.0
FEEDBACK_CHARS = 4_000
DOWNLOAD_SECONDS = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where sandboxes come from: one of Harbor's types, or an import path."""

    type: str | None
    import_path: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Load what trials need, and ask the backend whether it can work.

        Raises:
            ConfigurationError: there is no such backend, or it cannot work here.
        """
        # Trials need this: loaded here once, it is there in processes that are forked for instances.
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.environment_type import EnvironmentType

        known = [member.value for member in EnvironmentType]
        if self.type is not None and self.type not in known:
            raise ConfigurationError(
                f"backend={self.type!r} must be 'bubblewrap', an import path 'module:Class', or one of Harbor's: "
                f"{', '.join(known)}"
            )
        kind = None if self.type is None else EnvironmentType(self.type)
        try:
            EnvironmentFactory.run_preflight(kind, self.import_path)
        except (SystemExit, ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"backend={self.type or self.import_path!r} cannot work here: {error}") from error


def find_backend(backend: str, options: Mapping[str, Any]) -> Backend:
    """
    Example:
        >>> find_backend("docker", {}).type, find_backend("ours.boxes:Box", {}).import_path
        ('docker', 'ours.boxes:Box')
    """
    if backend == "bubblewrap":
        return Backend(type=None, import_path=BUBBLEWRAP, options=options)
    if ":" in backend:
        return Backend(type=None, import_path=backend, options=options)
    return Backend(type=backend, import_path=None, options=options)


def task_folders(place: str, registry: str | None) -> list[Path]:
    """The task folders of a folder, or of a registry's dataset, which is downloaded into Harbor's cache.

    Raises:
        ConfigurationError: there is no such folder or dataset, or it has no task.
    """
    folder = Path(place).expanduser()
    if folder.is_dir():
        found = [folder] if (folder / "task.toml").exists() else sorted(
            entry for entry in folder.iterdir() if (entry / "task.toml").exists()
        )  # fmt: skip
    elif registry is None and (place.startswith((".", "/", "~")) or "@" not in place):
        raise ConfigurationError(
            f"tasks={place!r}: there is no such folder; a dataset of Harbor's registry is written 'name@version'"
        )
    else:
        (outcome,) = call_all_now([partial(_download, place, registry)], timeout=DOWNLOAD_SECONDS)
        if not isinstance(outcome, Ok):
            why = first_line(outcome.error) if isinstance(outcome, Raised) else "it took too long"
            raise ConfigurationError(f"tasks={place!r} cannot be had from the registry: {why}")
        found = cast(list[Path], outcome.value)
    if not found:
        raise ConfigurationError(f"tasks={place!r} has no task: no folder in it has a task.toml")
    return [entry.resolve() for entry in found]


async def _download(name: str, registry: str | None) -> list[Path]:
    from harbor.models.job.config import DatasetConfig
    from harbor.tasks.client import TaskClient

    plain, _, version = name.partition("@")
    wanted: dict[str, Any] = {"name": plain}
    if version:
        wanted["ref" if "/" in plain else "version"] = version
    if registry is not None:
        wanted["registry_url" if "://" in registry else "registry_path"] = registry
    configs = await DatasetConfig(**wanted).get_task_configs()
    downloads = await TaskClient().download_tasks([config.get_task_id() for config in configs])
    return [result.path for result in downloads.results]


def check_task(folder: Path, backend: Backend) -> str:
    """The task's instruction, once it is known that it can be played here.

    Raises:
        ConfigurationError: it is no task of Harbor's, or one that cannot be played.
    """
    from harbor.models.task.config import TaskOS
    from harbor.models.task.task import Task

    try:
        task = Task(folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{folder} is no task of Harbor's: {first_line(error)}") from error
    config = task.config
    reasons = {
        "it has steps, each with an instruction and a verifier of its own; an episode is one": task.has_steps,
        "its sandbox is Windows, and the tools are a POSIX shell's": config.environment.os == TaskOS.WINDOWS,
        "it brings MCP servers or skills, which its agent would have to use": bool(
            config.environment.mcp_servers or config.environment.skills_dir
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"{folder} cannot be played: {reason}")
    if backend.import_path == BUBBLEWRAP:
        _check_bubblewrap(folder, task, backend.options)
    return str(task.instruction)


def _check_bubblewrap(folder: Path, task: Any, options: Mapping[str, Any]) -> None:
    from envgrad.environments.adapters.harbor_build import BASE_IMAGES, read_build

    users = {task.config.agent.user, task.config.verifier.user} - {None, "root", 0, "0"}
    if users:
        raise ConfigurationError(
            f"{folder}: the bubblewrap backend has one user, root, and the task wants {sorted(map(str, users))}: use "
            "backend='docker' or 'podman'"
        )
    definition = task.config.environment
    try:
        read_build(task.paths.environment_dir, images=options.get("images", BASE_IMAGES), image=definition.docker_image)
    except ConfigurationError as error:
        raise ConfigurationError(f"{folder}: {error}") from error


class Trial:
    """One episode's trial. Everything here runs on the background loop."""

    def __init__(self, environment: BaseEnvironment, task: asyncio.Task[Any], folder: Path, seat: str) -> None:
        self.environment = environment
        self.feedback = ""
        self._task, self._folder, self._seat = task, folder, seat

    @classmethod
    async def begin(cls, task_folder: Path, backend: Backend, verifier_options: Mapping[str, Any]) -> Trial:
        """Start a trial, and wait until its sandbox can be used.

        Raises:
            EnvironmentFailure: the sandbox could not be had.
        """
        from harbor.trial.trial import Trial as HarborTrial

        from envgrad.environments.adapters.harbor_backend import SEATS, Seat

        key, folder = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="envgrad-harbor-"))
        seat = SEATS[key] = Seat(ready=asyncio.get_running_loop().create_future())
        running: asyncio.Task[Any] | None = None
        begun = False
        try:
            trial = await HarborTrial.create(_trial_config(task_folder, folder, key, backend, verifier_options))
            running = asyncio.create_task(trial.run())
            await asyncio.wait({running, seat.ready}, return_when=asyncio.FIRST_COMPLETED)
            if not seat.ready.done():
                raise _failure(await running, "the sandbox could not be had")
            begun = True
            return cls(seat.ready.result(), running, folder, key)
        except (OSError, ValueError, RuntimeError) as error:
            raise EnvironmentFailure(f"Harbor could not begin the trial: {first_line(error)}") from error
        finally:
            if not begun:
                await _end(running, folder, key)

    async def finish(self) -> dict[str, float] | None:
        """Let the verifier run; its rewards, or None where it could not tell any.

        Raises:
            EnvironmentFailure: something else than the verifier failed.
        """
        from harbor.models.trial.error_policy import FailureCause

        from envgrad.environments.adapters.harbor_backend import SEATS

        SEATS[self._seat].finished.set()
        try:
            result = await self._task
            self.feedback = _last_words(self._folder)
        finally:
            await self.end()
        problem = result.exception_info
        if problem is None and result.verifier_result is not None and result.verifier_result.rewards:
            return {str(name): float(value) for name, value in _named(result.verifier_result.rewards).items()}
        if problem is None or problem.policy.cause == FailureCause.VERIFIER_FAILED:
            return None
        raise _failure(result, "the trial failed")

    async def end(self) -> None:
        """Remove the sandbox and the trial's files, whatever state they are in. Safe to call twice."""
        await _end(self._task, self._folder, self._seat)


async def _end(running: asyncio.Task[Any] | None, folder: Path, key: str) -> None:
    from envgrad.environments.adapters.harbor_backend import SEATS

    SEATS.pop(key, None)
    if running is not None and not running.done():
        running.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.shield(asyncio.wait({running}))
    shutil.rmtree(folder, ignore_errors=True)


def _trial_config(task: Path, folder: Path, key: str, backend: Backend, verifier_options: Mapping[str, Any]) -> Any:
    from harbor.models.environment_type import EnvironmentType
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig

    return TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=folder,
        # The time that an episode takes is mostly that of others which are sampled beside it: limits are the run's.
        agent=AgentConfig(import_path=f"{OURS}:EpisodeAgent", kwargs={"seat": key}, override_timeout_sec=NO_LIMIT),
        environment=EnvironmentConfig(
            type=None if backend.type is None else EnvironmentType(backend.type),
            import_path=backend.import_path,
            kwargs=dict(backend.options),
        ),
        verifier=VerifierConfig(**verifier_options),
    )


def _failure(result: TrialResult, what: str) -> EnvironmentFailure:
    problem = result.exception_info
    words = "it ended early" if problem is None else f"{problem.exception_type}: {problem.exception_message}"
    return EnvironmentFailure(f"{what}: {words}")


def _named(rewards: object) -> Mapping[str, Any]:
    return rewards if isinstance(rewards, Mapping) else {"reward": rewards}


def _last_words(folder: Path) -> str:
    """The end of what the verifier printed."""
    logs: Sequence[Path] = list(folder.glob("*/verifier/test-stdout.txt"))
    if not logs or logs[0].is_symlink():
        return ""
    return logs[0].read_text(encoding="utf-8", errors="replace")[-FEEDBACK_CHARS:].strip()
