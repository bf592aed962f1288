"""What all episodes of one environment share, and how a call of the environment becomes a value or a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from envgrad.chat.base import Renderer
from envgrad.environments.boundary import Ok, Outcome, Raised, TimedOut, WorkerPool
from envgrad.environments.contract import EnvironmentSpec
from envgrad.environments.isolation import Isolation
from envgrad.errors import EnvironmentFailure, EpisodeFailure
from envgrad.rollout.activity import Activity
from envgrad.rollout.scoring import RewardSource, RewardWeights
from envgrad.sampling.sampler import Sampler, SamplingParams

if TYPE_CHECKING:
    from envgrad.rollout.opening import EpisodeStart
    from envgrad.types import Episode, Task

CustomRollout: TypeAlias = Callable[[list[Any]], Mapping[str, Any]]
"""Prompts (one for each sibling) -> ``prompt_ids``, ``completion_ids``, ``logprobs`` and more: see ``custom``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of one episode: tokens, turns and seconds. None is no limit."""

    max_completion_length: int
    max_context: int
    max_turns: int | None = None
    max_turn_tokens: int | None = None
    episode_timeout: float | None = None
    tool_timeout: float | None = None
    reset_timeout: float | None = None
    reward_timeout: float | None = None


class AgentHost(Protocol):
    """Plays episodes of environments whose agent owns the loop: ``agents.host.LoopbackHost``."""

    async def play(
        self, context: EpisodeContext, begin: EpisodeStart, task: Task, sibling: int, attempt: int
    ) -> Episode:
        """As ``episode.play``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """What all episodes of one environment share."""

    spec: EnvironmentSpec
    renderer: Renderer
    sampler: Sampler
    sampling: SamplingParams
    limits: EpisodeLimits
    workers: WorkerPool
    isolation: Isolation = field(default_factory=Isolation)
    """whether instances get their own stream of the process-global random generators"""
    ask_feedback: bool = False
    """call ``get_feedback()`` after each episode, where the environment has it"""
    reward_sources: tuple[RewardSource, ...] = ()
    reward_weights: RewardWeights = field(default_factory=RewardWeights)
    rollout_func: CustomRollout | None = None
    """the user's own way to play a group, instead of the episode loop"""
    agents: AgentHost | None = None
    """plays the episodes, where ``spec.runs_agent``"""
    vocab_size: int | None = None
    """token ids that the policy knows, where ids come from the user"""
    activity: Activity = field(default_factory=Activity)
    """is told what goes on; the runner's"""


def value_or_failure(outcome: Outcome, where: str, timeout_error: type[EpisodeFailure], limit: float | None) -> object:
    """The value of a call of the environment, or the failure that it is.

    Raises:
        EpisodeFailure: the call raised, or took longer than ``limit`` seconds (then ``timeout_error``).
    """
    match outcome:
        case Ok(value=value):
            return value
        case Raised(error=EpisodeFailure() as error):
            raise error
        case Raised(error=error):
            raise EnvironmentFailure(f"{where} raised {type(error).__name__}: {error}") from error
        case TimedOut():
            raise timeout_error(f"{where} took longer than {limit} s")
