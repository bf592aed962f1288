"""Scripted episodes through adapters, played as the rollout plays them, without a model."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envgrad.environments.isolation import Stream
from envgrad.environments.sources import hash63

WHOLE = os.environ.get("ENVGRAD_ECOSYSTEMS") == "whole"
"""whether all of an ecosystem is played, or a fixed part of it"""


@dataclass(slots=True)
class Sibling:
    """One sibling of a group in an environment that reads free text; its generators are its own."""

    episode: Any
    group: int
    player: Callable[[list[str], random.Random], str]
    """what was read so far -> the answer"""
    log: list[object] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self._stream = Stream(hash63("generators", self.group))
        self._random = random.Random(7)

    _stream: Stream = field(init=False)
    _random: random.Random = field(init=False)

    def start(self) -> None:
        opening = self._stream.run(lambda: self.episode.reset(seed=self.group))
        self.read.append(opening[-1]["content"])
        self.log.append(opening)
        self.over = self.episode.done

    def turn(self) -> None:
        if self.over:
            return
        answer = self.player(self.read, self._random)
        result = self._stream.run(lambda: self.episode.step(answer))
        self.read.append(result.observation)
        self.log.append((answer, result.observation, result.done))
        self.over = result.done

    @property
    def reward(self) -> float | None:
        return self._stream.run(self.episode.get_reward)

    @property
    def turns(self) -> int:
        return len(self.log) - 1


def play_together(siblings: list[Sibling], most_turns: int) -> None:
    """Turn by turn, so that each one's calls stand between those of the others."""
    for sibling in siblings:
        sibling.start()
    for _ in range(most_turns):
        for sibling in siblings:
            sibling.turn()
