"""From groups to what credit reads: rewards, components and turn rewards; and from advantages to training samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isnan

from envgrad.rollout.scoring import RewardWeights
from envgrad.types import Episode, Group, TrainingSample

TURNS = "turns"
"""the component that holds the sum of an episode's turn rewards"""


def is_scored(episode: Episode) -> bool:
    """Whether the episode has a reward; one without is never trained."""
    return episode.reward is not None and not isnan(episode.reward)


def with_parts(groups: Sequence[Group]) -> list[Group]:
    """``groups``, and for each of the policy's other parts in them a group of its own: its episodes of all siblings.

    A part is thus compared with the same part of the siblings, as the agent is with the agents. Their openings may
    differ, since the agent may have moved before; the baseline is still one that does not depend on the part's own
    actions (a baseline for each role: SPIRAL, arXiv:2506.24119, section 3).
    """
    found = list(groups)
    for group in groups:
        names = dict.fromkeys(part.part for episode in group.episodes for part in episode.parts)
        for name in names:
            parts = tuple(part for episode in group.episodes for part in episode.parts if part.part == name)
            found.append(Group(task=group.task, episodes=parts))
    return found


def group_rewards(groups: Sequence[Group]) -> list[list[float | None]]:
    """One reward per episode, in sibling order; None where unscorable."""
    return [[episode.reward if is_scored(episode) else None for episode in group.episodes] for group in groups]


def component_rewards(
    groups: Sequence[Group], weights: Mapping[str, float]
) -> tuple[list[list[list[float | None]]], list[float]]:
    """``[group][component][sibling]`` and each component's weight, for ``advantages.gdpo_advantages``.

    Components are the union of names over all groups, in order of appearance. One that an episode does not have is
    None there; but a scored episode without paid turns has earned 0 of them. An unscorable episode has none.
    """
    names = list(dict.fromkeys(name for group in groups for episode in group.episodes for name in episode.rewards))
    by_name = RewardWeights(weights)

    def component(episode: Episode, name: str) -> float | None:
        if not is_scored(episode):
            return None
        return episode.rewards.get(name, 0.0 if name == TURNS else None)

    rewards = [[[component(episode, name) for episode in group.episodes] for name in names] for group in groups]
    return rewards, [by_name.of(name) for name in names]


def turn_rewards(groups: Sequence[Group], weights: Mapping[str, float]) -> list[list[list[float] | None]]:
    """``[group][sibling]`` -> the reward of each turn, for ``advantages.turn_advantages``; they sum to the episode's.

    A turn has its own reward (weighted as the component ``turns`` is); what the episode earned beside them, from
    ``get_reward``, the group or reward functions, counts on its last turn.
    """
    weight = RewardWeights(weights).of(TURNS)
    return [[_of_turns(episode, weight) for episode in group.episodes] for group in groups]


def _of_turns(episode: Episode, weight: float) -> list[float] | None:
    if episode.reward is None or isnan(episode.reward) or not episode.turns:
        return None
    rewards = [weight * (turn.reward or 0.0) for turn in episode.turns]
    rest = episode.reward - fsum(rewards)
    if abs(rest) > 1e-12 * fsum(abs(reward) for reward in rewards):  # below, it is the rounding of the sum
        rewards[-1] += rest
    return rewards


def training_samples(
    episode: Episode, advantage: float, *, ref_logprobs: Sequence[float] | None = None
) -> list[TrainingSample]:
    """A sample for each row of ``episode`` (one, but for agents that branch), with ``advantage`` on sampled tokens.

    Args:
        episode: Scored.
        advantage: Of the whole episode.
        ref_logprobs: The reference's log-probs of the sampled tokens, row after row, if the loss reports them.
    """
    reference = None if ref_logprobs is None else iter(ref_logprobs)
    return [
        _sample(
            episode,
            number,
            tuple(advantage if trained else 0.0 for trained in row.mask),
            None if reference is None else tuple(next(reference) if trained else 0.0 for trained in row.mask),
        )
        for number, row in enumerate(episode.rows)
    ]


def training_sample(
    episode: Episode, advantage: float, *, ref_logprobs: Sequence[float] | None = None
) -> TrainingSample:
    """``training_samples`` of an episode with one row."""
    (sample,) = training_samples(episode, advantage, ref_logprobs=ref_logprobs)
    return sample


def turn_samples(episode: Episode, advantages: Sequence[float]) -> list[TrainingSample]:
    """A sample for each row of ``episode``, with one advantage per turn on the turn's sampled tokens."""
    rows = [[0.0] * len(row.mask) for row in episode.rows]
    masks = [row.mask for row in episode.rows]
    for turn, advantage in zip(episode.turns, advantages, strict=True):
        for at in range(turn.start, turn.start + turn.num_tokens):
            rows[turn.row][at] = advantage if masks[turn.row][at] else 0.0
    return [_sample(episode, number, tuple(row), None) for number, row in enumerate(rows)]


def _sample(
    episode: Episode, number: int, advantages: tuple[float, ...], ref_logprobs: tuple[float, ...] | None
) -> TrainingSample:
    row = episode.rows[number]
    return TrainingSample(
        token_ids=row.token_ids,
        mask=row.mask,
        logprobs=row.logprobs,
        versions=row.versions,
        advantages=advantages,
        prompt_length=row.prompt_length,
        group=episode.task.key,
        truncated=episode.truncated,
        ref_logprobs=ref_logprobs,
        episode=episode,
        row=number,
        episode_tokens=episode.num_sampled_tokens if episode.branches else None,
    )
