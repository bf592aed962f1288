"""What is measured: models, prompts, and for every episode how many turns it has and how long each is.

Both sides play the same table of lengths. A model's own choices would not do: they differ from run to run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

Part = Literal["step", "train"]

SIBLINGS = 8
_SHARES = (6, 6, 5, 5, 4, 4, 3, 2)
"""sixths of ``most_calls`` that the siblings of a group make: "up to" so many calls, 35 in 48 on the whole"""
_LENGTHS = (10, 14, 20, 12, 24, 16, 8, 18)
"""tokens of a small model's turns, in turn over rows and turns; the mean is 15"""
_LONGER = (24, 32, 40, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step, fixed in all its token counts.

    Example:
        >>> work = Workload(name="w", title="", model="small", groups=1, prompt_tokens=9, most_calls=6, lengths=(2, 3))
        >>> [len(turns) for turns in work.plan()], work.plan()[6], work.calls
        ([7, 7, 6, 6, 5, 5, 4, 3], (2, 3, 2, 3), 35)
    """

    name: str
    title: str
    model: str
    """``small``, ``smollm2``, or ``vocabulary-N``: the small model with N tokens"""
    groups: int
    prompt_tokens: int
    """tokens of each prompt, within a few"""
    lengths: tuple[int, ...]
    siblings: int = SIBLINGS
    most_calls: int = 0
    """tool calls of the episodes that make most of them"""
    varied_calls: bool = True
    """siblings make different numbers of calls; else all make ``most_calls``"""
    tool_seconds: float = 0.0
    part: Part = "step"
    """what the ratio is about: the whole step, or its training part"""
    tuned_as: str = ""
    """the workload whose best threads and micro-batches are taken; its own by default"""
    whole: bool = False
    """train the step in one micro-batch on both sides, so that memory compares; else as is fastest"""
    pairs: int | None = None

    def __post_init__(self) -> None:
        if self.varied_calls and self.siblings != len(_SHARES):
            raise ValueError(f"varied_calls needs {len(_SHARES)} siblings, got {self.siblings}")

    @property
    def episodes(self) -> int:
        return self.groups * self.siblings

    def plan(self) -> tuple[tuple[int, ...], ...]:
        """For each episode, in order of groups and siblings: the tokens of each of its turns, terminator included.

        All turns but the last make one call.
        """
        table = []
        for row in range(self.episodes):
            share = _SHARES[row % self.siblings] if self.varied_calls else 6
            turns = self.most_calls * share // 6 + 1
            table.append(tuple(self.lengths[(3 * row + 5 * turn) % len(self.lengths)] for turn in range(turns)))
        return tuple(table)

    @property
    def calls(self) -> int:
        """Tool calls of the step."""
        return sum(len(turns) - 1 for turns in self.plan())

    @property
    def sampled(self) -> int:
        """Sampled tokens of the step."""
        return sum(sum(turns) for turns in self.plan())

    def quick(self) -> Workload:
        """The same, small enough to try out."""
        shorter = tuple(max(4, length // 4) for length in self.lengths)
        title = f"{self.title} (cut down: 1 group, turns of a quarter)"
        return replace(self, title=title, groups=1, prompt_tokens=min(self.prompt_tokens, 300), lengths=shorter)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """
        Example:
            >>> Workload.from_json(WORKLOADS["small-6"].to_json()) == WORKLOADS["small-6"]
            True
        """
        values = json.loads(text)
        return cls(**(values | {"lengths": tuple(values["lengths"])}))


def _small(calls: int, *, seconds: float = 0.0, pairs: int | None = None) -> Workload:
    slow = f", each tool call takes {seconds:g} s" if seconds else ""
    return Workload(
        name=f"{'slow-tool' if seconds else 'small'}-{calls}",
        title=f"small model, 32 episodes, up to {calls} tool calls{slow}",
        model="small", groups=4, prompt_tokens=300, lengths=_LENGTHS, most_calls=calls, tool_seconds=seconds,
        tuned_as="" if calls == 6 and not seconds else "small-6", pairs=pairs,
    )  # fmt: skip


def _vocabulary(size: int, length: int) -> Workload:
    return Workload(
        name=f"vocabulary-{size // 1000}k-{length}",
        title=f"small model with {size:,} tokens, 16 episodes, one turn of {length}",
        model=f"vocabulary-{size}", groups=2, prompt_tokens=50, lengths=(length,), pairs=2, whole=True,
        tuned_as="vocabulary-150k-64",
    )  # fmt: skip


_ALL = (
    _small(6),
    _small(12),
    _small(3, pairs=3),
    _small(9, pairs=3),
    _small(6, seconds=0.1),
    _small(12, seconds=0.1),
    Workload(
        name="smollm2-1", title="SmolLM2-135M, 16 episodes, one turn of 64 tokens", model="smollm2", groups=2,
        prompt_tokens=50, lengths=(64,),
    ),
    Workload(
        name="smollm2-1-whole",
        title="SmolLM2-135M, 16 episodes, one turn of 64 tokens, one micro-batch",
        model="smollm2",
        groups=2,
        prompt_tokens=50,
        lengths=(64,),
        whole=True,
        pairs=2,
    ),
    Workload(
        name="smollm2-4", title="SmolLM2-135M, 16 episodes of 4 turns", model="smollm2", groups=2, prompt_tokens=100,
        lengths=_LONGER, most_calls=3, varied_calls=False, tuned_as="smollm2-1",
    ),
    Workload(
        name="long-prompt", title="small model, 32 episodes, prompts of 1,000 tokens, answers of 32: the training part",
        model="small", groups=4, prompt_tokens=1000, lengths=(32,), part="train", tuned_as="small-6",
    ),
    Workload(
        name="long-prompt-smollm2", title="SmolLM2-135M, 8 episodes, prompt of 1,000 tokens, answers of 32: the "
        "training part", model="smollm2", groups=1, prompt_tokens=1000, lengths=(32,), part="train",
        tuned_as="smollm2-1", pairs=3,
    ),
    _vocabulary(150_000, 64),
    _vocabulary(50_000, 64),
    _vocabulary(150_000, 256),
)  # fmt: skip

WORKLOADS: dict[str, Workload] = {one.name: one for one in _ALL}
"""by name, in the order in which they run"""

QUICK = ("small-6", "slow-tool-6", "smollm2-1", "long-prompt")
"""what runs without being asked for more"""
