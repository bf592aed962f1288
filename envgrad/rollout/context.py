"""What all episodes of one environment share, and how a call of the environment becomes a value or a failure."""

from __future__ import annotations

from dataclasses import dataclass

from envgrad.chat.renderer import ChatRenderer
from envgrad.environments.boundary import Ok, Outcome, Raised, TimedOut, WorkerPool
from envgrad.environments.contract import EnvironmentSpec
from envgrad.errors import EnvironmentFailure, EpisodeFailure
from envgrad.sampling.sampler import Sampler, SamplingParams


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """What all episodes of one environment share."""

    spec: EnvironmentSpec
    renderer: ChatRenderer
    sampler: Sampler
    sampling: SamplingParams
    limits: EpisodeLimits
    workers: WorkerPool


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
