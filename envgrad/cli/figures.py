"""What a run's progress is in numbers: rewards, phases, rates. Fed by the events of a training loop; shows nothing.

::

    step ended --logs, evaluation, checkpoint--> pause over --rollout, pack--> fetched --train--> trained --> step ended
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from envgrad.rollout.runner import Round
from envgrad.types import Episode

PHASES = ("rollout", "pack", "train", "optimizer and other")
_WINDOW = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTrace:
    """One finished step: when it ended, and what it played."""

    ended: float
    episodes: int
    sampled_tokens: int
    seconds: dict[str, float]


class RunFigures:
    """Progress of one run. Rates, shares and the time left are over the last ten steps.

    Args:
        clock: Seconds, always growing.

    Example:
        >>> now = iter([0.0, 3.0, 5.0, 6.0])
        >>> figures = RunFigures(clock=lambda: next(now))
        >>> figures.start(step=0, max_steps=4)
        >>> figures.end_fetch(); figures.end_training(); figures.end_step(1, Round(groups=(), seconds=2.0))
        >>> figures.phases()
        {'rollout': 2.0, 'pack': 1.0, 'train': 2.0, 'optimizer and other': 1.0}
        >>> figures.eta()
        18.0
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.step = 0
        self.max_steps = 0
        self.rewards: list[float] = []
        """mean reward of each round that was played; the first is the untrained policy's"""
        self.by_environment: dict[str, list[float]] = {}
        self.failures: Counter[str] = Counter()
        self.dropped_groups = 0
        self.total_episodes = 0
        self.last_round: Round | None = None
        self.phase = "starting"
        """what is going on now, in words"""
        self._mark = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._played = (0, 0)
        self._traces: deque[_StepTrace] = deque(maxlen=_WINDOW + 1)

    # -- events

    def start(self, *, step: int, max_steps: int) -> None:
        """The loop begins, at ``step`` of ``max_steps``."""
        self.step, self.max_steps = step, max_steps
        began = self._enter("playing episodes")
        self._traces.append(_StepTrace(ended=began, episodes=0, sampled_tokens=0, seconds={}))

    def end_fetch(self) -> None:
        """The step's samples are there: played, scored and packed."""
        since = self._mark
        self._seconds["pack"] += self._enter("training") - since

    def end_training(self) -> None:
        """Forward and backward are done."""
        since = self._mark
        self._seconds["train"] += self._enter("updating weights") - since

    def end_step(self, step: int, played: Round | None) -> None:
        """The optimizer has stepped; ``played`` is the latest round, the same as before if it is reused."""
        self.step = step
        self.pause_over()
        if played is not None and played is not self.last_round:
            rollout = min(played.seconds, self._seconds["pack"])
            self._seconds["rollout"] += rollout
            self._seconds["pack"] -= rollout
            self._add_round(played)
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        episodes, tokens = self._played
        self._played = (0, 0)
        self._traces.append(
            _StepTrace(ended=self._mark, episodes=episodes, sampled_tokens=tokens, seconds=seconds)
        )  # fmt: skip

    def pause_over(self) -> None:
        """A log, an evaluation or a checkpoint between two steps is done."""
        since = self._mark
        self._seconds["optimizer and other"] += self._enter("playing episodes") - since

    def _enter(self, phase: str) -> float:
        self._mark = self._clock()
        self.phase = phase
        return self._mark

    def _add_round(self, played: Round) -> None:
        self.last_round = played
        episodes = [episode for group in (*played.scored, *played.dropped) for episode in group.episodes]
        self.total_episodes += len(episodes)
        before, tokens = self._played
        self._played = (before + len(episodes), tokens + sum(episode.num_sampled_tokens for episode in episodes))
        self.failures += played.failures
        self.dropped_groups += len(played.dropped)
        kept = [episode for group in played.scored for episode in group.episodes]
        self.rewards.extend(_mean_reward(kept))
        for name in sorted({episode.task.environment for episode in kept}):
            of_name = [episode for episode in kept if episode.task.environment == name]
            self.by_environment.setdefault(name, []).extend(_mean_reward(of_name))

    # -- figures

    def phases(self) -> dict[str, float]:
        """Seconds per step in each phase."""
        steps = [trace.seconds for trace in self._traces if trace.seconds]
        return {name: fmean(seconds[name] for seconds in steps) if steps else 0.0 for name in PHASES}

    def shares(self) -> dict[str, float]:
        """Share of the time in each phase; 0 before the first step."""
        seconds = self.phases()
        total = math.fsum(seconds.values())
        return {name: value / total if total else 0.0 for name, value in seconds.items()}

    def episodes_per_second(self) -> float:
        return self._rate([trace.episodes for trace in self._traces])

    def tokens_per_second(self) -> float:
        """Sampled tokens per second of the whole loop, training included."""
        return self._rate([trace.sampled_tokens for trace in self._traces])

    def _rate(self, counts: list[int]) -> float:
        elapsed = self._traces[-1].ended - self._traces[0].ended if self._traces else 0.0
        return sum(counts[1:]) / elapsed if elapsed > 0 else 0.0

    def eta(self) -> float:
        """Seconds left; infinite before the first step is done."""
        done = len(self._traces) - 1
        if done < 1:
            return math.inf
        return (self._traces[-1].ended - self._traces[0].ended) / done * (self.max_steps - self.step)

    def in_phase(self) -> float:
        """Seconds since the current phase began."""
        return self._clock() - self._mark if self._traces else 0.0


def _mean_reward(episodes: list[Episode]) -> list[float]:
    scored = [episode.reward for episode in episodes if episode.reward is not None]
    return [fmean(scored)] if scored else []
