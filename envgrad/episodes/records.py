"""What the episode log holds, as records: a line per episode (``EpisodeSummary``), and an episode whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from envgrad.errors import ConfigurationError
from envgrad.types import Message

Order: TypeAlias = Literal["newest", "oldest", "reward", "-reward", "advantage", "-advantage", "tokens", "-tokens"]
"""how episodes are listed: by when they were logged, or by a figure, the largest first behind a minus; those without
the figure come last"""


class Use(StrEnum):
    """What became of an episode."""

    TRAINED = "trained"
    """in an optimizer step, with whatever advantage"""
    FILTERED = "filtered"
    """scored, and replaced by dynamic sampling, because its group teaches nothing"""
    STALE = "stale"
    """scored, and too old to be trained"""
    DROPPED = "dropped"
    """too few of its siblings could be scored, so that the group was replaced"""
    EVALUATED = "evaluated"
    FAILED = "failed"
    """it could not be finished: ``failed`` has the kind, ``error`` the words"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """One line of the log: what lists, filters and curves need."""

    number: int
    """the episode's key in its run: 0, 1, 2, ... in the order in which they were logged"""
    group: int
    """the group's key in its run; siblings share it"""
    step: int
    """optimizer steps made when the round was taken into training, or evaluated"""
    split: str
    environment: str
    position: int
    """the task's number in its split's stream"""
    task_index: int | None
    group_id: int
    seed: int
    sibling: int
    part: str
    """which other part of the policy's in the same game this is (``Episode.part``); empty for the agent itself"""
    attempt: int
    """0, or how many attempts failed before"""
    use: Use
    reward: float | None
    rewards: Mapping[str, float | None]
    """components by name"""
    advantage: float | None
    """mean over the sampled tokens; None where no credit was given"""
    stop_reason: str | None
    """a value of ``StopReason``; None for failed episodes"""
    failed: str | None
    """``EpisodeFailure.kind``; None for finished episodes"""
    truncated: bool
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float
    """all phases"""
    first_version: int | None
    """lowest policy version among the sampled tokens"""
    last_version: int | None
    current: bool
    """False if the run was resumed from before this episode, so that it is not in the lineage of the final weights"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One tool call with its result."""

    id: str
    name: str | None
    arguments: Any
    """as the model wrote them, parsed"""
    error: str | None
    """why the call could not be read"""
    result: str
    ok: bool
    reward: float | None
    seconds: float
    tool: str | None
    """the tool's name; None if there is no such tool"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One sampled answer and what the environment did with it."""

    start: int
    """index in its token row of the first sampled token"""
    num_tokens: int
    policy_version: int
    message: Message
    text: str
    """as sampled, reasoning and calls included"""
    calls: tuple[CallRecord, ...]
    observation: str | None
    """what ``step`` returned"""
    reward: float | None
    sample_seconds: float
    tool_seconds: float
    row: int
    """index in ``EpisodeRecord.rows``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One token row; all tuples have one length. Values at tokens with mask 0 mean nothing."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    """the sampler's"""
    versions: tuple[int, ...]
    prompt_length: int
    advantages: tuple[float, ...] | None
    """None where no credit was given (evaluation, failures, filtered)"""
    trainer_logprobs: tuple[float, ...] | None
    """the policy's own before the first update, where the trainer computed them; the ratio is
    ``exp(trainer_logprobs - logprobs)``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """An episode, whole."""

    summary: EpisodeSummary
    messages: tuple[Message, ...]
    """the whole chat of the main row"""
    opening: int
    """how many of ``messages`` came before the first answer"""
    tools: tuple[Mapping[str, Any], ...]
    """schemas that the opening showed"""
    plain_prompt: str | None
    turns: tuple[TurnRecord, ...]
    rows: tuple[TokenRecord, ...]
    """the main row, then branches; empty for failed episodes"""
    seconds: Mapping[str, float]
    """by phase: reset, sample, tools, reward"""
    extras: Mapping[str, Any]
    """what reward functions logged beside the reward"""
    feedback: str | None
    error: str | None
    """of a failed episode"""
    epoch: int
    row: Mapping[str, Any] | None
    """the dataset's row, as JSON holds it"""
    row_is_exact: bool
    """False if the dataset's row has values that JSON does not hold"""
    start: str | None
    """the environment's state after reset (``environments.plain_start``), where no id tells the task"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """A step's metrics. Curves: ``[(step.step, step.metrics["loss"]) for step in reader.steps()]``."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """as the trainer logged them at this step, by name (``loss``, ``reward``, ``eval_reward``, ...); empty at steps
    without a log"""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """mean training reward by environment, of the rounds taken in at this step"""
    eval_rewards: Mapping[str, float] = field(default_factory=dict)
    """mean evaluation reward by environment"""
    episodes: int = 0
    """training episodes logged at this step, failed ones included"""
    eval_episodes: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """Which episodes; None leaves a condition out. Ranges include both ends.

    Raises:
        ConfigurationError: an empty range.
    """

    split: str | None = None
    environment: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    stop_reason: str | None = None
    use: Use | None = None
    failed: bool | None = None
    """True: failed ones only; False: none of them"""
    truncated: bool | None = None
    group: int | None = None
    task_index: int | None = None
    part: str | None = None
    """another part of the policy's; ``""``: the agents themselves, which rewards are averaged over"""
    text: str | None = None
    """words that prompt, answers or tool results hold, all of them; "quoted words" are a phrase; the last word may be
    a beginning. Only the first ``TEXT_LIMIT`` characters of each of the three are searched"""
    current: bool | None = True
    """True: the lineage of the present weights; False: what a resume left behind; None: both"""

    def __post_init__(self) -> None:
        for low, high in (("first_step", "last_step"), ("min_reward", "max_reward")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ConfigurationError(f"{low}={least} is above {high}={most}: no episode can be within")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A line of an episode's text, for lists."""

    prompt: str
    """how its opening's last message begins"""
    answer: str
    """how its last answer begins; of a failed episode, its error"""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is new since a cursor."""

    cursor: str
    """give it to the next ``follow``"""
    changed: bool
    episodes: int
    """how many were added"""
    last_step: int
    """-1 before the first"""
    reset: bool
    """True if what was read before may not hold any more (a resume, old parts dropped): read all anew"""
