"""What went wrong in a run, counted by kind: kept group by group, so that it is complete however the run ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from envgrad.types import Group


@dataclass(slots=True, kw_only=True)
class Tally:
    """Groups and episodes of one split, and their failures by kind. One thread adds.

    Example:
        >>> from envgrad.types import FailedEpisode, Task
        >>> task = Task(position=0, split="train", environment="e", group_id=1, seed=2)
        >>> failed = FailedEpisode(task=task, sibling=0, attempts=3, kind="environment", error=OSError("no board"))
        >>> tally = Tally()
        >>> tally.add(Group(task=task, episodes=(), failures=(failed,), faults={"environment": 3}))
        >>> tally.dropped += 1
        >>> for line in tally.lines():
        ...     print(line)
        1 group was played, and 1 dropped; 0 episodes were finished
        1 episode was dropped after its retries: 1 environment
        3 attempts or calls failed: 3 environment
    """

    split: str = "train"
    groups: int = 0
    """groups that were played to their end, dropped ones included"""
    dropped: int = 0
    """groups with too few scored siblings"""
    episodes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """episodes that were dropped after their retries"""
    faults: Counter[str] = field(default_factory=Counter)
    """attempts that failed, whether they were made again or not, and tool calls that were stopped (``tool_timeout``)"""
    closes: int = 0
    """calls of ``close()`` that raised, or took too long"""
    hung: int = 0
    """threads that were left behind in a call that hangs, when the run ended"""

    def add(self, group: Group) -> None:
        """Count a group that has been played."""
        if group.task.split != self.split:
            return
        self.groups += 1
        self.episodes += len(group.episodes)
        self.failures.update(failure.kind for failure in group.failures)
        self.faults.update(group.faults)

    @property
    def is_clean(self) -> bool:
        """Whether nothing has failed."""
        return not (self.dropped or self.failures or self.faults or self.closes or self.hung)

    def metrics(self) -> dict[str, float]:
        """Totals of the run so far, for its last log."""
        totals = {"groups": self.groups, "groups_dropped": self.dropped, "episodes": self.episodes}
        totals |= {f"failures/{kind}": count for kind, count in sorted(self.failures.items())}
        totals |= {f"faults/{kind}": count for kind, count in sorted(self.faults.items())}
        return {f"run/{name}": float(value) for name, value in totals.items()}

    def lines(self) -> list[str]:
        """The run's summary in words."""
        lines = [
            f"{_count(self.groups, 'group')} played, and {self.dropped} dropped; "
            f"{_count(self.episodes, 'episode')} finished"
        ]
        if self.failures:
            dropped = _count(self.failures.total(), "episode")
            lines.append(f"{dropped} dropped after {_its(self.failures.total())} retries: {_kinds(self.failures)}")
        if self.faults:
            one = self.faults.total() == 1
            lines.append(
                f"{self.faults.total()} attempt{'' if one else 's'} or call{'' if one else 's'} failed: "
                f"{_kinds(self.faults)}"
            )
        if self.closes:
            lines.append(f"{self.closes} times close() raised or took too long")
        if self.hung:
            lines.append(f"{_count(self.hung, 'thread')} left behind in a call that hangs")
        return lines


def _its(count: int) -> str:
    return "its" if count == 1 else "their"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun} was" if count == 1 else f"{count} {noun}s were"


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
