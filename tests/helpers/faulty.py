"""A sound environment, and copies of it with one planted fault each."""

from __future__ import annotations

import math
import os
import random
import time
from enum import Enum
from typing import Any, Literal

from envgrad.environments.contract import StepResult, ToolResult
from envgrad.errors import EnvironmentFailure

SCORES: list[int] = []


class Sound:
    """Guess a letter. It does all that the contract has, and does it right."""

    determinism: str | None = "seeded"

    def __init__(self) -> None:
        self.rounds = 0

    def reset(self, seed: int, split: str = "train") -> str:
        self.secret = random.Random(seed).choice("abcdef" if split == "train" else "ghijkl")
        self.guesses: list[str] = []
        return "Guess my letter."

    def guess(self, letter: Literal["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]) -> str:
        """
        Guess the letter.

        Args:
            letter: Your guess.
        """
        self.guesses.append(letter)
        return "right" if letter == self.secret else "wrong"

    @property
    def done(self) -> bool:
        return self.secret in self.guesses or len(self.guesses) >= 3

    def get_reward(self) -> Any:
        return float(self.secret in self.guesses)

    def fork(self) -> Sound:
        other = type(self)()
        vars(other).update(vars(self))
        other.guesses = list(self.guesses)
        return other

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds = state["rounds"]

    def close(self) -> None:
        self.guesses = []


class RandomReward(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random()

    def start_state(self) -> str:
        return self.secret

    def get_reward(self) -> float:
        return self.chance.random()


class DeclaredRandomReward(RandomReward):
    determinism = "none"


class UndeclaredRandomReward(RandomReward):
    determinism = None


class SharedClassList(Sound):
    history: list[str] = []

    def guess(self, letter: Literal["a", "b", "c"]) -> str:
        """Guess the letter."""
        self.history.append(letter)
        return f"{super().guess(letter)}: {len(self.history)} so far"  # type: ignore[arg-type]


class SharedCounter(Sound):
    """Equal when episodes follow each other, different when they are interleaved."""

    current: list[str] = []

    def reset(self, seed: int, split: str = "train") -> str:
        self.current.clear()
        return super().reset(seed, split)

    def guess(self, letter: Literal["a", "b", "c"]) -> str:
        """Guess the letter."""
        self.current.append(letter)
        return f"{super().guess(letter)}: guess {len(self.current)}"  # type: ignore[arg-type]


class SharedDefault(Sound):
    def __init__(self, log: list[str] = []) -> None:  # noqa: B006
        super().__init__()
        self.log = log

    def guess(self, letter: Literal["a", "b", "c"]) -> str:
        """Guess the letter."""
        self.log.append(letter)
        return super().guess(letter)  # type: ignore[arg-type]


class ModuleState(Sound):
    def get_reward(self) -> float:
        SCORES.append(1)
        return super().get_reward()


class IgnoresSeed(Sound):
    determinism = None

    def reset(self, seed: int, split: str = "train") -> str:
        self.seed, self.split, self.random = seed, split, random.Random(seed)  # kept, and of no use
        return super().reset(7, split)


class UnseededStart(Sound):
    def reset(self, seed: int, split: str = "train") -> str:
        prompt = super().reset(random.SystemRandom().randrange(10**9), split)
        return f"{prompt} It is not {random.SystemRandom().randrange(10**9)}."


class HiddenName(Sound):
    """What differs is no part of the task."""

    def reset(self, seed: int, split: str = "train") -> str:
        self.name = str(random.SystemRandom().randrange(10**9))
        return super().reset(seed, split)


class GlobalRandom(Sound):
    def reset(self, seed: int, split: str = "train") -> str:
        prompt = super().reset(seed, split)
        self.secret = random.choice("abcdef" if split == "train" else "ghijkl")
        return prompt


class LateGlobalRandom(Sound):
    def guess(self, letter: Literal["a", "b", "c"]) -> str:
        """Guess the letter."""
        random.random()
        return super().guess(letter)  # type: ignore[arg-type]


class CloseOnce(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[int] | None = [1]

    def close(self) -> None:
        assert self.open is not None, "closed already"
        self.open = None


class CloseNeedsReset(Sound):
    def close(self) -> None:
        self.guesses.clear()


class InfiniteReward(Sound):
    def get_reward(self) -> float:
        return math.inf


class NanReward(Sound):
    def get_reward(self) -> dict[str, float]:
        return {"win": 0.0, "style": math.nan}


class TextReward(Sound):
    def get_reward(self) -> str:
        return "1.0"


class NanTurn(Sound):
    def guess(self, letter: Literal["a", "b", "c"]) -> ToolResult:  # type: ignore[override]
        """Guess the letter."""
        return ToolResult(super().guess(letter), reward=math.nan)  # type: ignore[arg-type]


class FailsWithoutGuess(Sound):
    def get_reward(self) -> float:
        return float(self.guesses[-1] == self.secret)


class BytesChoice(Sound):
    def shout(self, word: Literal[b"hey"]) -> str:
        """Shout."""
        return str(word)


class NoAnnotation(Sound):
    def shout(self, word) -> str:  # type: ignore[no-untyped-def]
        """Shout."""
        return str(word)


class ForkSharesList(Sound):
    def fork(self) -> Sound:
        other = super().fork()
        other.guesses = self.guesses
        return other


class ForkForgets(Sound):
    def fork(self) -> Sound:
        other = super().fork()
        other.secret = "z"
        return other


class ForkSelf(Sound):
    def fork(self) -> Sound:
        return self


class PaysSilence(Sound):
    def get_reward(self) -> float:
        return float(not self.guesses or self.secret in self.guesses)


class PaysTrying(Sound):
    def guess(self, letter: Literal["a", "b", "c"]) -> ToolResult:  # type: ignore[override]
        """Guess the letter."""
        return ToolResult(super().guess(letter), reward=0.5)  # type: ignore[arg-type]


class PaysAll(Sound):
    def get_reward(self) -> float:
        return 1.0


class StepsCost(Sound):
    def get_reward(self) -> float:
        return float(self.secret in self.guesses) - len(self.guesses)


class SplitIgnored(Sound):
    def reset(self, seed: int, split: str = "train") -> str:
        return super().reset(seed, "train")


class Hangs(Sound):
    def reset(self, seed: int, split: str = "train") -> str:
        time.sleep(60)
        return ""


class HangsInReward(Sound):
    def get_reward(self) -> float:
        time.sleep(60)
        return 0.0


class BlocksTheLoop(Sound):
    async def reset(self, seed: int, split: str = "train") -> str:  # type: ignore[override]
        time.sleep(60)  # never awaits: nothing can stop it
        return ""


class NeverAwaited(Sound):
    async def reset(self, seed: int, split: str = "train") -> str:  # type: ignore[override]
        import asyncio

        await asyncio.sleep(60)
        return ""


class DoneNeedsArgument(Sound):
    def done(self, strict: bool) -> bool:  # type: ignore[override]
        return strict


class DoneIsText(Sound):
    @property
    def done(self) -> str:  # type: ignore[override]
        return "no"


class DoneAtOnce(Sound):
    @property
    def done(self) -> bool:
        return True


class Leftover(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.guesses = []

    def reset(self, seed: int, split: str = "train") -> str:
        kept = self.guesses
        prompt = super().reset(seed, split)
        self.guesses = kept[:2]
        return prompt


class LosesState(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.rounds = random.SystemRandom().randrange(10**9)

    def start_state(self) -> str:
        return self.secret

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class UnsavableState(Sound):
    def state_dict(self) -> dict[str, Any]:
        return {"hook": lambda: None}


class MovesTheFolder(Sound):
    def reset(self, seed: int, split: str = "train") -> str:
        os.environ["GUESS_A_LETTER"] = str(time.perf_counter())
        return super().reset(seed, split)


class NoPrompt(Sound):
    def reset(self, seed: int, split: str = "train") -> Any:
        super().reset(seed, split)
        return 42


class ResetRaises(Sound):
    def reset(self, seed: int, split: str = "train") -> str:
        raise ZeroDivisionError("no letters left")


class ToolFailsEpisode(Sound):
    def guess(self, letter: Literal["a", "b", "c"]) -> str:
        """Guess the letter."""
        raise EnvironmentFailure("the guess was wrong")


class WrongDeclaration(Sound):
    determinism = "fixed"


class UnknownDeclaration(Sound):
    determinism = "mostly"


class Independent:
    """Neither an id, nor a fork, nor a copy: it has a close."""

    def __init__(self) -> None:
        self.generator = random.Random()

    def reset(self) -> str:
        self.secret = self.generator.randrange(10**9)
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess the number."""
        return "higher" if self.secret > number else "lower"

    def get_reward(self) -> float:
        return 0.0

    def close(self) -> None: ...


class Finite:
    """Ten tasks by index, for both splits the same ones."""

    def reset(self, task_index: int) -> str:
        self.index = task_index
        return f"What is {task_index} + 1?"

    def step(self, message: str) -> StepResult:
        return StepResult("", reward=float(message == str(self.index + 1)), done=True)

    @classmethod
    def num_tasks(cls, split: str) -> int:
        return 10


class OffByOne(Finite):
    def reset(self, task_index: int) -> str:
        return f"{super().reset(task_index)} {'abcdefghi'[task_index]}"


class NoTasks(Finite):
    @classmethod
    def num_tasks(cls, split: str) -> int:
        return 0


class ParsesNumbers(Finite):
    """Its step raises for text that is no number."""

    def step(self, message: str) -> StepResult:
        return StepResult("", reward=float(int(message) == self.index + 1), done=True)


class FindsWords(Finite):
    """Pays for an answer that contains the right one: the whole prompt does, too."""

    def reset(self, task_index: int) -> str:
        super().reset(task_index)
        words = ["red", "green", "blue", "grey", "pink", "gold", "teal", "lime", "plum", "rust"]
        self.word = words[task_index]
        return f"Which of these is it: {', '.join(words)}? It has {len(self.word)} letters."

    def step(self, message: str) -> StepResult:
        return StepResult("", reward=float(self.word in message), done=True)


class NotANumber(Enum):
    NAN = math.nan


class NanChoice(Sound):
    def shout(self, loudness: NotANumber) -> str:
        """Shout."""
        return str(loudness)


class DoneIsMethod(Sound):
    def done(self) -> bool:  # type: ignore[override]
        return len(self.guesses) >= 3


class HiddenId(Sound):
    def reset(self, **kwargs: Any) -> str:  # type: ignore[override]
        return super().reset(kwargs["seed"], kwargs["split"])


class SameSeries:
    """Each instance draws the same series of tasks."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def reset(self) -> str:
        self.secret = self.random.randrange(10**6)
        return "Guess."

    def guess(self, number: int) -> str:
        """Guess the number."""
        return "right" if number == self.secret else "wrong"

    def get_reward(self) -> float:
        return 0.0


class KeepsNan(Sound):
    """Sound, with a value in its state that is not equal to itself."""

    def reset(self, seed: int, split: str = "train") -> str:
        self.score = math.nan
        return super().reset(seed, split)


class NanAndIgnoresSeed(IgnoresSeed):
    def reset(self, seed: int, split: str = "train") -> str:
        self.score = math.nan
        return super().reset(seed, split)
