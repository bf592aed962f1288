"""Tasks of Harbor as environments of ours: a shell in a sandbox, and Harbor's own verifier as the reward."""

from __future__ import annotations

import base64
import importlib.util
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from envgrad.environments.adapters.background import (
    background_loop,
    in_background,
    obtain_in_background,
    run_in_background,
)
from envgrad.environments.adapters.harbor_trial import Backend, Trial, check_task, find_backend, task_folders
from envgrad.environments.adapters.task_splits import task_ranges
from envgrad.environments.members import tool
from envgrad.errors import ConfigurationError, EnvironmentContractError, EnvironmentFailure, ToolCallError

if TYPE_CHECKING:
    from harbor.environments.base import ExecResult

Determinism = Literal["fixed", "task", "seeded", "none"]
Places: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
CLOSE_SECONDS = 60.0
CHUNK = 60_000
"""characters of a file that go with one command: an argument of a program is limited"""
TIMED_OUT = 124


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A task that can be played."""

    folder: Path
    instruction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    tasks: Mapping[str, Sequence[Played]]
    """by split"""
    backend: Backend
    verifier: Mapping[str, Any]
    reward: str | None
    tool_seconds: int
    output_chars: int
    determinism: Determinism


class HarborInstance:
    """An episode: a sandbox of the task's, from ``reset`` until its verifier has run."""

    def __init__(self, rules: _Rules) -> None:
        self._rules = rules
        self._trial: Trial | None = None
        self._words = ""
        self.determinism = rules.determinism

    def num_tasks(self, split: str) -> int:
        return len(self._rules.tasks["train" if split == "train" else "eval"])

    async def reset(self, task_index: int, split: str = "train") -> str:
        await self._end()
        task = self._rules.tasks["train" if split == "train" else "eval"][task_index]
        self._words = ""
        self._trial = await obtain_in_background(
            Trial.begin(task.folder, self._rules.backend, self._rules.verifier), give_up=_leave_soon
        )
        return task.instruction

    def start_state(self) -> object:
        """A sandbox is not looked into: siblings have the same task."""
        return {}

    @tool
    async def shell(self, command: str) -> str:
        """
        Run a shell command in the sandbox.

        Args:
            command: The command, run by bash in the task's working directory.
        """
        seconds = self._rules.tool_seconds
        done = await self._exec(f"timeout -k 2 {seconds} bash -c {shlex.quote(command)} < /dev/null", seconds + 5)
        parts = [(done.stdout or "").rstrip("\n"), (done.stderr or "").rstrip("\n")]
        if done.return_code == TIMED_OUT:
            parts.append(f"[ended after {seconds} seconds]")
        elif done.return_code:
            parts.append(f"[exit code {done.return_code}]")
        return _cut("\n".join(part for part in parts if part) or "(no output)", self._rules.output_chars)

    @tool
    async def read_file(self, path: str) -> str:
        """
        Read a file of the sandbox as text.

        Args:
            path: The file's path.
        """
        most = 4 * self._rules.output_chars
        done = await self._exec(f"test -f {shlex.quote(path)} && head -c {most} -- {shlex.quote(path)}", 30)
        if done.return_code:
            raise ToolCallError(f"there is no file {path!r} that can be read")
        return _cut(done.stdout or "", self._rules.output_chars)

    @tool
    async def write_file(self, path: str, content: str) -> str:
        """
        Write a file of the sandbox, in the place of what it held.

        Args:
            path: The file's path; folders are made as needed.
            content: The file's whole text.
        """
        where, data = shlex.quote(path), base64.b64encode(content.encode("utf-8", "replace")).decode()
        commands = [f'mkdir -p -- "$(dirname -- {where})" && : > {where}']
        commands += [f"echo {data[n : n + CHUNK]} | base64 -d >> {where}" for n in range(0, len(data), CHUNK)]
        for command in commands:
            done = await self._exec(command, 30)
            if done.return_code:
                raise ToolCallError(f"{path!r} cannot be written: {(done.stderr or '').strip()}")
        return f"{len(content)} characters written"

    async def _exec(self, command: str, seconds: int) -> ExecResult:
        """
        Raises:
            EnvironmentFailure: the sandbox is gone, or does not answer.
        """
        trial = self._now()
        try:
            return await in_background(trial.environment.exec(command, timeout_sec=seconds))
        except (OSError, RuntimeError) as error:
            raise EnvironmentFailure(f"the sandbox does not answer: {error}") from error

    async def get_reward(self) -> float | None:
        """The verifier's word; None where it told no reward."""
        trial, self._trial = self._now(), None
        rewards = await in_background(trial.finish())
        self._words = trial.feedback
        return None if rewards is None else self._one(rewards)

    def _one(self, rewards: Mapping[str, float]) -> float | None:
        name = self._rules.reward or ("reward" if "reward" in rewards else next(iter(rewards)))
        if name not in rewards or (self._rules.reward is None and name != "reward" and len(rewards) > 1):
            raise EnvironmentContractError(
                f"the verifier tells the rewards {sorted(rewards)}: name one of them by HarborEnvironment(reward=...)"
            )
        return rewards[name] if math.isfinite(rewards[name]) else None

    def get_feedback(self) -> str | None:
        """The end of what the verifier printed."""
        return self._words or None

    def _now(self) -> Trial:
        if self._trial is None:
            raise EnvironmentFailure("there is no sandbox: the episode has been scored, or was never begun")
        return self._trial

    async def _end(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            await in_background(trial.end())

    def close(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            run_in_background(trial.end(), timeout=CLOSE_SECONDS)


def _cut(text: str, most: int) -> str:
    """The beginning and the end of a long text.

    Example:
        >>> _cut("0123456789", 6)
        '012\\n[4 characters left out]\\n789'
    """
    if len(text) <= most:
        return text
    head = most // 2
    tail = most - head
    return f"{text[:head]}\n[{len(text) - most} characters left out]\n{text[-tail:]}"


def _leave_soon(trial: Trial) -> None:
    task = background_loop().create_task(trial.end())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


_ending: set[Any] = set()
"""asyncio keeps no task alive by itself"""


@dataclass(frozen=True, eq=False)
class HarborEnvironment:
    """An ``environment_factory`` that plays tasks of Harbor.

    The prompt is the task's instruction, tools are a shell and files of its sandbox, and the reward is what Harbor's
    verifier writes. A verifier that writes none, or nothing that can be read, leaves the episode unscored (None, never
    0); a sandbox that fails is the environment's failure, and the episode is played anew. Sandboxes start side by side,
    and each is removed with its episode.

    Needs Python 3.12 or newer: from an older one, play it through ``OtherPython``.

    Args:
        tasks: a folder of task folders, one task folder, a dataset of Harbor's registry (``"name@version"``), or
            several of these.
        eval_tasks: for evaluation; None: the last tenth of ``tasks``, which training then leaves out.
        backend: ``"bubblewrap"`` (ours: no containers, no network, nothing built), one of Harbor's types such as
            ``"docker"`` or ``"podman"``, or the import path of a class, ``"module:Class"``.
        backend_options: passed to the backend.
        registry: another registry: an address, or a file.
        reward: which of the verifier's rewards counts, where it tells several and none is called ``reward``.
        verifier: options of Harbor's ``VerifierConfig``, such as ``{"override_timeout_sec": 60}``.
        tool_seconds: the longest that a shell command may take.
        output_chars: of a tool's answer; the middle of a longer one is left out.
        determinism: what decides an episode beside the actions; ``check_environment`` probes it.

    Raises:
        ConfigurationError: an option that cannot work; harbor is not installed; there are no such tasks, one of them
            cannot be played on this backend, or the backend cannot work here.

    Example:
        >>> HarborEnvironment("tasks", tool_seconds=0)
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: tool_seconds=0 must be above 0
    """

    tasks: Places
    _: KW_ONLY
    eval_tasks: Places | None = None
    backend: str = "bubblewrap"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    registry: str | None = None
    reward: str | None = None
    verifier: Mapping[str, Any] = field(default_factory=dict)
    tool_seconds: int = 20
    output_chars: int = 10_000
    determinism: Determinism = "task"
    _rules: _Rules = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for option in ("tool_seconds", "output_chars"):
            if not getattr(self, option) > 0:
                raise ConfigurationError(f"{option}={getattr(self, option)!r} must be above 0")
        if self.determinism not in get_args(Determinism):
            raise ConfigurationError(
                f"determinism={self.determinism!r} must be one of {', '.join(get_args(Determinism))}"
            )
        if not self.backend:
            raise ConfigurationError("backend='' must be 'bubblewrap', a type of Harbor's, or 'module:Class'")
        if importlib.util.find_spec("harbor") is None:
            raise ConfigurationError(
                "HarborEnvironment needs the package harbor: pip install 'envgrad[harbor]' on Python 3.12 or newer. "
                "From an older Python, play it in another one: OtherPython('.venv-harbor/bin/python', "
                "'envgrad.environments.adapters.harbor:HarborEnvironment', {'tasks': ...})"
            )
        object.__setattr__(self, "_rules", self._look())

    @property
    def __name__(self) -> str:
        """What reports and metrics call it."""
        return "HarborEnvironment"

    def __call__(self) -> HarborInstance:
        return HarborInstance(self._rules)

    def _look(self) -> _Rules:
        backend = find_backend(self.backend, self.backend_options)
        backend.check()
        tasks = self._playable(self.tasks, backend)
        if self.eval_tasks is not None:
            split = {"train": tasks, "eval": self._playable(self.eval_tasks, backend)}
        else:
            ranges = task_ranges("tasks", None, ["tasks"], lambda _: len(tasks))
            split = {name: tasks[part.start : part.start + part.count] for name, part in ranges.items()}
        return _Rules(
            tasks=split,
            backend=backend,
            verifier=self.verifier,
            reward=self.reward,
            tool_seconds=self.tool_seconds,
            output_chars=self.output_chars,
            determinism=self.determinism,
        )

    def _playable(
        self, tasks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], backend: Backend
    ) -> list[Played]:
        places = [tasks] if isinstance(tasks, str | os.PathLike) else list(tasks)
        folders = [folder for place in places for folder in task_folders(os.fspath(place), self.registry)]
        if not folders:
            raise ConfigurationError(f"tasks={tasks!r} names no task")
        return [Played(folder=folder, instruction=check_task(folder, backend)) for folder in folders]
