"""Environments of the package ``verifiers``, played by itself in a Python of its own, trained through the endpoint."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from envgrad.agents.endpoint import AgentEndpoint
from envgrad.agents.program import AgentProgram, ProgramFailed
from envgrad.errors import ConfigurationError

RUNNER = Path(__file__).with_name("verifiers_runner.py")


@dataclass
class VerifiersEnvironment:
    """An ``environment_factory`` over a verifiers taskset (verifiers 0.4).

    verifiers owns the task, the loop, the tools and the reward; the policy answers. Its requirements conflict with
    those of other ecosystems, so it runs in a virtual environment of its own.

    Args:
        taskset: its id, as verifiers finds it: a module, or an installed taskset.
        python: the interpreter that has ``verifiers``, and ``uv`` beside it, with which verifiers runs its agents.
        eval_from: tasks from this index on are for ``split="eval"``; None: both splits are all tasks.
        config: further configuration, as verifiers reads it under ``env``: ``{"agent": {"max_turns": 8}}``. By default
            its agents run as local processes; give ``agent.runtime`` to have them in containers.
        time_limit: seconds that one episode may take.
        environ: variables of the process, as ``PYTHONPATH``.

    Raises:
        ConfigurationError: no such interpreter. When the tasks are counted: verifiers cannot load the taskset.
    """

    taskset: str
    _: KW_ONLY
    python: str | Path
    eval_from: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    time_limit: float = 600.0
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not Path(self.python).is_file():
            raise ConfigurationError(
                f"python={str(self.python)!r} is no interpreter: make a virtual environment, install verifiers and uv "
                "into it, and give its bin/python"
            )
        if self.eval_from is not None and self.eval_from < 1:
            raise ConfigurationError(f"eval_from={self.eval_from} leaves no task to train on; it must be at least 1")

    @property
    def __name__(self) -> str:
        return "verifiers"

    def __call__(self) -> VerifiersEpisode:
        return VerifiersEpisode(self)

    def program(self, what: str) -> AgentProgram:
        """The runner as a program: ``count`` or ``play``."""
        bin_folder = str(Path(self.python).parent)
        path = {"PATH": f"{bin_folder}:{os.environ.get('PATH', os.defpath)}", **self.environ}
        # -P: the runner's own folder is none to import from
        command = [str(self.python), "-P", str(RUNNER), what, "--taskset", self.taskset]
        command += ["--config", json.dumps(dict(self.config))]
        return AgentProgram(command, time_limit=self.time_limit, environ=path)

    @cached_property
    def size(self) -> int:
        """How many tasks there are."""
        program = self.program("count")
        done = subprocess.run(
            program.command,
            env={**os.environ, **program.environ},
            capture_output=True,
            text=True,
            timeout=self.time_limit,
            check=False,
        )
        if done.returncode:
            raise ConfigurationError(f"verifiers cannot load {self.taskset!r}: {done.stderr.strip()[-2000:]}")
        return int(json.loads(done.stdout.splitlines()[-1])["tasks"])


class VerifiersEpisode:
    """One episode at a time; ``verifiers_runner`` plays it."""

    determinism: str | None = "task"

    def __init__(self, environment: VerifiersEnvironment) -> None:
        self._environment = environment
        self._reward: float | None = None

    def num_tasks(self, split: str) -> int:
        first = self._environment.eval_from
        if first is None:
            return self._environment.size
        return min(first, self._environment.size) if split != "eval" else max(0, self._environment.size - first)

    def reset(self, task_index: int, split: str = "train") -> str:
        self._reward = None
        first = self._environment.eval_from
        self._index = task_index + (first if first is not None and split == "eval" else 0)
        return f"{self._environment.taskset}, task {self._index}"

    async def run_agent(self, endpoint: AgentEndpoint) -> None:
        program = self._environment.program("play")
        said = await program.run(endpoint, "--index", str(self._index))
        result = json.loads(said.stdout.splitlines()[-1])
        self._reward = result["reward"]
        if self._reward is None:
            raise ProgramFailed(f"verifiers could not finish the episode: {'; '.join(result['errors'])}")

    def get_reward(self) -> float | None:
        """None where the episode was cut off before verifiers scored it."""
        return self._reward
