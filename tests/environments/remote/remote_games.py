"""Environments that tests run in another process. The file is imported there by name."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time

from envgrad.environments.members import StepResult, ToolResult
from envgrad.errors import EnvironmentFailure, EpisodeDone


class GameError(Exception):
    pass


class _Deaf:
    """What is raised while it goes is printed, and forgotten."""

    def __del__(self):
        time.sleep(2.0)


class Counter:
    """Counts; its tools show each way in which a call can end."""

    def __init__(self, start: int = 0):
        self.start = start

    def reset(self, seed: int, split: str = "train"):
        self.count, self.goal = self.start, seed % 7
        return f"Count to {self.goal} ({split})."

    def add(self, n: int = 1) -> str:
        """Add.

        Args:
            n: how many
        """
        self.count += n
        return f"now {self.count}"

    def pay(self) -> str:
        """Pay for the turn."""
        return ToolResult("paid", reward=0.25)

    def finish(self) -> str:
        """End it."""
        raise EpisodeDone("over")

    def fail(self) -> str:
        """Raise."""
        raise GameError("no board")

    def break_down(self) -> str:
        """Fail as an environment."""
        raise EnvironmentFailure("the board burnt")

    async def wait(self, seconds: float) -> str:
        """Wait, async.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return "waited"

    def sleep(self, seconds: float) -> str:
        """Wait, blocking, past every `except Exception`.

        Args:
            seconds: how long
        """
        with contextlib.suppress(Exception):
            time.sleep(seconds)
        return "slept"

    def hang_hard(self) -> str:
        """Hang where no signal handler runs."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        time.sleep(3600)
        return "never"

    def die(self) -> str:
        """Be killed."""
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    def start_child(self) -> str:
        """Start a process and leave it."""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return str(child.pid)

    def where(self) -> str:
        """Tell the process."""
        return f"{os.getpid()} {os.getppid()}"

    @property
    def done(self) -> bool:
        return self.count > self.goal

    def get_reward(self):
        return {"hit": float(self.count == self.goal), "style": None}


class Stubborn:
    """Hangs in more than its tools, and writes down that it is closed."""

    def __init__(self, log: str):
        self.log, self.ending, self.hangs = log, "mate", False

    def reset(self, seed: int):
        return "Go."

    def sleep_deaf(self) -> str:
        """Wait, and first where an exception is lost."""
        _Deaf()
        time.sleep(60)
        return "slept"

    async def clean_up_for_long(self) -> str:
        """Wait, and clean up."""
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(20)
        return "slept"

    def read(self, text: str) -> str:
        """Read.

        Args:
            text: long
        """
        return str(len(text))

    def hang_in_done(self) -> str:
        """Let `done` hang."""
        self.hangs = True
        return "ok"

    @property
    def done(self) -> bool:
        if self.hangs:
            time.sleep(60)
        return False

    def state_dict(self) -> dict[str, int]:
        time.sleep(60)
        return {}

    def load_state_dict(self, state) -> None: ...

    def get_reward(self) -> float:
        return 1.0

    def close(self) -> None:
        with open(self.log, "a") as file:
            file.write("closed\n")


class Parrot:
    """Reads free text."""

    determinism = "fixed"

    def reset(self):
        self.heard = []
        return [{"role": "system", "content": "Speak."}, {"role": "user", "content": "Hello"}]

    def step(self, message: str):
        self.heard.append(message)
        return StepResult(f"{message}?", reward=0.5, done=len(self.heard) == 2)


class Walker:
    """Has a fork, and draws from the global generator."""

    @classmethod
    def num_tasks(cls, split: str) -> int:
        return 5 if split == "train" else 2

    def reset(self):
        self.place = random.randrange(10**9)
        return "Walk."

    def go(self) -> str:
        """Go."""
        self.place += 1
        return str(self.place)

    def fork(self):
        other = Walker()
        other.place = self.place
        return other

    def get_reward(self):
        return 1.0


class Dealt:
    """Draws from the global generator in reset, and cannot be forked."""

    def reset(self):
        self.card = random.randrange(10**9)
        return f"Card {self.card}."

    def look(self) -> str:
        """Look."""
        return str(self.card)

    def get_reward(self):
        return float(self.card)


class Judged:
    def reset(self):
        return "x"

    @classmethod
    def group_reward(cls, environments):
        return [0.0 for _ in environments]
