"""The flow as records, in flow order.

::

    Task -> Turn -> Episode -> Group -> TrainingSample        (then packing.py: Batch)

A token row of one episode with two turns, and what each array holds (all of one length)::

    token_ids   p0  p1  p2 | a0  a1  e | s0  s1 | b0  e        p: opening prompt, a/b: sampled turns,
    mask         0   0   0 |  1   1  1 |  0   0 |  1  1        s: suffix (separator, tool result, next header),
    logprobs     0   0   0 | la  la le |  0   0 | lb le        e: the sampled end-of-turn token
    versions    -1  -1  -1 |  4   4  4 | -1  -1 |  5  5

Sampled ids are never re-encoded; the row only grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isnan
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""A chat message: ``{"role": ..., "content": ...}``, with ``tool_calls``, ``tool_call_id``, ``name`` where needed."""

Prompt: TypeAlias = str | list[Message] | None


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    """the environment ended it (``done``, ``StepResult.done``, ``EpisodeDone``)"""
    ANSWER = "answer"
    """the model answered without a tool call"""
    MAX_TURNS = "max_turns"
    MAX_COMPLETION_LENGTH = "max_completion_length"
    MAX_TURN_TOKENS = "max_turn_tokens"
    CONTEXT = "context"
    """the model's context is full"""
    EPISODE_TIMEOUT = "episode_timeout"
    TOOL_TIMEOUT = "tool_timeout"
    """a tool that cannot be killed ran past ``tool_timeout``; the episode is unscorable"""

    @property
    def truncated(self) -> bool:
        """Whether a limit of ours, not the environment or the model, ended the episode."""
        return self not in (StopReason.DONE, StopReason.ANSWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task, drawn once from the task stream and given to all siblings of one group.

    Example:
        >>> task = Task(position=0, split="train", environment="compass", group_id=1 << 60, seed=1 << 61)
        >>> task.key
        'train/0'
    """

    position: int
    """the draw's number in its split's stream: 0, 1, 2, ..."""
    split: str
    environment: str
    """the environment's name; empty if the task has none"""
    group_id: int
    """63 bits, equal inside the group, different between groups; train and eval are disjoint"""
    seed: int
    """63 bits, a hash of ``group_id``"""
    task_index: int | None = None
    """index into a finite environment or dataset; None for endless ones"""
    epoch: int = 0
    """how many passes over the finite data came before this draw"""
    row: Mapping[str, Any] | None = None
    """the dataset's row, if there is one"""

    @property
    def key(self) -> str:
        return f"{self.split}/{self.position}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the model wrote it. ``arguments`` is whatever was parsed; ``error`` says why it cannot be run.

    Example:
        >>> ToolCall(id="call_0", name="guess", arguments={"number": 3}).error is None
        True
    """

    id: str
    name: str | None
    arguments: Any
    error: str | None = None
    """set if the call's text was malformed: it goes back to the model as the call's result"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """One executed (or refused) tool call and its result."""

    call: ToolCall
    content: str
    ok: bool
    """False if the call was malformed, refused by its schema, or raised"""
    reward: float | None = None
    seconds: float = 0.0
    tool: str | None = None
    """the tool's name; None if there is no such tool"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled answer and what the environment did with it."""

    start: int
    """index in the episode's row of the first sampled token"""
    num_tokens: int
    policy_version: int
    message: Message
    text: str = ""
    """the sampled text as it is, reasoning and calls included, without its terminator"""
    outcomes: tuple[ToolOutcome, ...] = ()
    observation: str | None = None
    """what ``step`` returned, in environments that read free text"""
    reward: float | None = None
    """sum of the rewards given for this turn"""
    sample_seconds: float = 0.0
    tool_seconds: float = 0.0
    row: int = 0
    """index in ``Episode.rows`` of the row that the turn is in; only agents that own their loop have more than one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One append-only token row of an episode.

    Example:
        >>> row = EpisodeRow(token_ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -0.1, -0.2), versions=(-1, 0, 0),
        ...     prompt_length=1)
        >>> row.completion_length, row.num_sampled_tokens
        (2, 2)
    """

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    prompt_length: int

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise AssertionError(f"token_ids, mask, logprobs and versions must have one length, got {sorted(lengths)}")

    @property
    def completion_length(self) -> int:
        """Tokens after the row's prompt, tool results included."""
        return len(self.token_ids) - self.prompt_length

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One finished episode as one append-only token row; as several, where an agent owns the loop and begins new chats.

    ``token_ids`` to ``prompt_length`` and ``messages`` are the main row's, the one with the last answer; ``branches``
    are the others. An episode is one action of its group whatever its number of rows: one reward, one place in the
    baseline, and one advantage for all rows (``algorithms.credit.training_samples``).

    Example:
        >>> task = Task(position=0, split="train", environment="e", group_id=1, seed=2)
        >>> episode = Episode(task=task, sibling=0, token_ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -0.1, -0.2),
        ...     versions=(-1, 0, 0), prompt_length=1, messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=1.0)
        >>> episode.completion_length, episode.truncated
        (2, False)
    """

    task: Task
    sibling: int
    attempt: int = 0
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    prompt_length: int
    messages: tuple[Message, ...]
    """the whole chat: opening, then assistant, tool and user messages as they came"""
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    reward: float | None
    """sum of turn rewards and ``get_reward()``; None if unscorable"""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """the reward's named components"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """wall-clock seconds by phase: reset, sample, tools, reward"""
    tools: tuple[Mapping[str, Any], ...] = ()
    """the schemas of the tools that the opening showed"""
    plain_prompt: str | None = None
    """the prompt, where it is plain text that no chat template touched; None in a chat"""
    feedback: str | None = None
    """what ``get_feedback()`` said after the episode, if the environment has it and the trainer asks"""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """what reward functions logged beside the reward (``log_extra``); goes to the episode log"""
    branches: tuple[EpisodeRow, ...] = ()
    """further rows, in the order in which they began: chats of an agent that did not extend the main one"""
    part: str = ""
    """which other part of the policy's in the same game this is, such as another seat; empty for the agent itself"""
    parts: tuple[Episode, ...] = ()
    """the policy's other parts (``policy.play_part``), each an episode with a reward of its own"""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise AssertionError(f"token_ids, mask, logprobs and versions must have one length, got {sorted(lengths)}")

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from all other episodes of a run: its task and part, and its number among the siblings."""
        return (f"{self.task.key}/{self.part}" if self.part else self.task.key), self.sibling

    @property
    def rows(self) -> tuple[EpisodeRow, ...]:
        """All token rows: the main one, then ``branches``; ``parts`` have their own."""
        main = EpisodeRow(
            token_ids=self.token_ids,
            mask=self.mask,
            logprobs=self.logprobs,
            versions=self.versions,
            prompt_length=self.prompt_length,
        )
        return (main, *self.branches)

    @property
    def main_turns(self) -> tuple[Turn, ...]:
        """The turns of the main row, which ``messages`` shows."""
        return tuple(turn for turn in self.turns if not turn.row) if self.branches else self.turns

    @property
    def completion_length(self) -> int:
        """Tokens after the prompts, tool results included; of all rows."""
        own = len(self.token_ids) - self.prompt_length
        return own + sum(row.completion_length for row in self.branches)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the rows' prompts."""
        return self.prompt_length + sum(row.prompt_length for row in self.branches)

    @property
    def num_sampled_tokens(self) -> int:
        """Of all rows."""
        return sum(self.mask) + sum(row.num_sampled_tokens for row in self.branches)

    @property
    def truncated(self) -> bool:
        return self.stop_reason.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEpisode:
    """An episode that was dropped after its retries."""

    task: Task
    sibling: int
    attempts: int
    kind: str
    """``EpisodeFailure.kind`` of the last attempt"""
    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The finished siblings of one task, in sibling order. ``failures`` are counted, never trained."""

    task: Task
    episodes: tuple[Episode, ...]
    failures: tuple[FailedEpisode, ...] = ()
    start_mismatch: str | None = None
    """how the siblings' starts differ, naming the attribute; None if they do not"""
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """what reward functions logged (``log_metric``), averaged over the step"""
    faults: Mapping[str, int] = field(default_factory=dict)
    """what went wrong on the way, by kind: attempts that failed, made again or not, and stopped tool calls"""
    start: str | None = None
    """the state after reset (``environments.plain_start``), where no id tells the task and the state is plain"""

    @property
    def scored_rewards(self) -> list[float]:
        """The rewards of the siblings that could be scored, in sibling order."""
        rewards = (episode.reward for episode in self.episodes)
        return [reward for reward in rewards if reward is not None and not isnan(reward)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One row to train: an episode's tokens with an advantage on each sampled one.

    ``advantages`` is per token (a per-turn credit gives turns different values); it is 0 where ``mask`` is 0.

    Example:
        >>> sample = TrainingSample(token_ids=(5, 6, 7), mask=(0, 1, 1), logprobs=(0.0, -0.1, -0.2),
        ...     versions=(-1, 0, 0), advantages=(0.0, 0.5, 0.5), prompt_length=1, group="train/0")
        >>> sample.num_trained_tokens
        2
    """

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantages: tuple[float, ...]
    prompt_length: int
    group: str
    """samples with one ``group`` and equal first ``prompt_length`` tokens share their prompt's forward pass"""
    truncated: bool = False
    ref_logprobs: tuple[float, ...] | None = None
    """the reference model's, where a credit has read them; 0 where ``mask`` is 0"""
    episode: Episode | None = None
    teacher_prompt: tuple[int, ...] | None = None
    """ids of the opening as a teacher sees it, who then reads the same tokens after the prompt; None without one"""
    row: int = 0
    """which of its episode's rows this is; an episode counts once, with row 0"""
    episode_tokens: int | None = None
    """trained tokens of the whole episode, where it has several rows; None: this row's are all"""

    def __post_init__(self) -> None:
        lengths = {
            "token_ids": len(self.token_ids),
            "mask": len(self.mask),
            "logprobs": len(self.logprobs),
            "versions": len(self.versions),
            "advantages": len(self.advantages),
        }
        if self.ref_logprobs is not None:
            lengths["ref_logprobs"] = len(self.ref_logprobs)
        if len(set(lengths.values())) != 1:
            raise AssertionError(f"all arrays of a TrainingSample must have one length, got {lengths}")
        if not 0 < self.prompt_length <= len(self.token_ids):
            raise AssertionError(f"prompt_length must be in 1..{len(self.token_ids)}, got {self.prompt_length}")
        if any(self.mask[: self.prompt_length]):
            raise AssertionError("the opening prompt is never trained: its mask must be 0")
        if self.teacher_prompt is not None and not self.teacher_prompt:
            raise AssertionError("a teacher's prompt must have a token; None is no teacher")
        if self.episode_tokens is not None and self.episode_tokens < sum(self.mask):
            raise AssertionError(f"an episode of {self.episode_tokens} tokens has a row of {sum(self.mask)}")

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.mask)

    @property
    def num_episode_tokens(self) -> int:
        """Trained tokens of the whole episode, in all its rows: what a mean over the episode divides by."""
        return sum(self.mask) if self.episode_tokens is None else self.episode_tokens
