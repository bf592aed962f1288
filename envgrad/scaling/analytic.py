"""A step's time from a few equations: how long an episode takes, and who waits for whom.

**An episode** takes ``E = reset + turns (tokens d(R) + reading + latency)`` seconds in the mean, where ``d(R)`` is a
decoding step with ``R`` rows, and ``R`` the episodes in flight of a replica that are not in their environments: a fixed
point. The slowest of ``n`` takes ``E(n)``, as of a log-normal quantity.

**A synchronous step** is publish + rollouts + training, one after the other. Rollouts take ``E(n)`` of the episodes in
flight, once for every wave of groups.

**An asynchronous step** is the longest of four: what the trainer does, ``T``; ``(T + E(n)) / (s + 1)`` with staleness
``s``, since a group that starts at one publish is trained ``s`` publishes later at the latest; ``E`` times the
episodes of a step over those in flight; and what the one thread that plays episodes does. In it ``E`` also has what
each publish costs the episodes in play: the pause, and reading their rows again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from envgrad.scaling.costs import Costs
from envgrad.scaling.workload import Workload

Limit = Literal["trainer", "samplers", "environments", "loop", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTime:
    """Where an episode's time goes, seconds in the mean."""

    decoding: float
    reading: float
    environment: float
    loop: float
    rows: float
    """that a replica decodes at once"""
    queued: float = 0.0
    """for a place at the sampler"""
    publishes: float = 0.0
    """pauses at publishes, and rows that are read again behind them"""

    @property
    def total(self) -> float:
        return self.decoding + self.reading + self.environment + self.loop + self.queued + self.publishes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """One optimizer step, seconds each."""

    seconds: float
    rollout: float
    """of a round; beside training where that is asynchronous"""
    training: float
    publish: float
    checkpoint: float
    """spread over the steps between two, as far as the trainer waits"""
    episode: EpisodeTime
    trainer_busy: float
    """share of the step in which the trainer computes"""
    sampler_busy: float
    loop_busy: float
    log_busy: float
    environments: float
    """episodes that are in their environment, in the mean"""
    log_bytes: float
    limit: Limit
    """whom the others wait for"""


def estimate(load: Workload, costs: Costs) -> StepEstimate:
    """The step of ``load`` at ``costs``.

    Example: 10 answers of 10 tokens at 0.1 s a token, then a training of 3 s.
        >>> from envgrad.scaling.costs import SamplerCosts, TrainerCosts
        >>> from envgrad.scaling.workload import Draw
        >>> load = Workload(groups=1, siblings=10, turns=Draw(mean=1), prompt_tokens=5, turn_tokens=Draw(mean=10))
        >>> found = estimate(load, Costs(sampler=SamplerCosts(step=0.1), trainer=TrainerCosts(step=3.0)))
        >>> round(found.seconds, 6), round(found.trainer_busy, 6), found.limit
        (4.0, 0.75, 'trainer')
    """
    training = _training(load, costs)
    episode = episode_time(load, costs)
    storage = costs.storage
    publish = storage.publish
    checkpoint = 0.0
    if storage.checkpoint_every and storage.checkpoint_blocks:
        checkpoint = storage.checkpoint / storage.checkpoint_every
    loop = load.episodes * (costs.loop.episode + load.turns.mean * costs.loop.turn)
    log_bytes = load.episodes * load.row_tokens * storage.log_bytes_per_token
    trainer = training + publish + checkpoint
    written = log_bytes / storage.log_rate
    if load.asynchronous:
        trainer += training * (costs.trainer_beside - 1.0)
        episode, rollout = _beside(load, costs, episode, trainer, loop)
        seconds = max(trainer, rollout, written)
    else:
        rollout = _inline(load, episode, loop)
        seconds = max(trainer + rollout, written)
    sampled = load.episodes * (episode.decoding + episode.reading)
    busy = sampled / max(1.0, episode.rows) / costs.replicas
    return StepEstimate(
        seconds=seconds,
        rollout=rollout,
        training=training,
        publish=publish,
        checkpoint=checkpoint,
        episode=episode,
        trainer_busy=min(1.0, training / seconds),
        sampler_busy=min(1.0, busy / seconds),
        loop_busy=min(1.0, loop / seconds),
        log_busy=min(1.0, log_bytes / storage.log_rate / seconds),
        environments=load.episodes * episode.environment / seconds,
        log_bytes=log_bytes,
        limit="log" if written >= seconds else _limit(episode, trainer, rollout, loop),
    )


def _limit(episode: EpisodeTime, trainer: float, rollout: float, loop: float) -> Limit:
    if trainer >= rollout:
        return "trainer"
    if loop >= 0.9 * rollout:
        return "loop"
    return "environments" if episode.environment > episode.decoding + episode.reading + episode.queued else "samplers"


def _training(load: Workload, costs: Costs) -> float:
    """Of the mean row; pairs grow with the square of a row's length, so that its variation counts."""
    needed, prompt = load.row_tokens - 1, load.prompt_tokens
    tokens = load.groups * prompt + load.episodes * (needed - prompt)
    sampled = load.turns.mean * load.turn_tokens.mean
    variance = (load.turn_tokens.cv**2 / load.turns.mean + load.turns.cv**2) * sampled**2
    row_pairs = (needed * (needed + 1) + variance) / 2
    prompt_pairs = prompt * (prompt + 1) / 2
    pairs = load.groups * prompt_pairs + load.episodes * (row_pairs - prompt_pairs)
    return costs.trainer.seconds(episodes=load.episodes, tokens=tokens, pairs=pairs)


def episode_time(load: Workload, costs: Costs) -> EpisodeTime:
    """The fixed point of rows and an episode's time."""
    sampler, turns = costs.sampler, load.turns.mean
    flight = load.in_flight / costs.replicas
    prompt_each = load.prompt_tokens / load.siblings
    suffix = prompt_each + (turns - 1) * (load.result_tokens + 1)
    context = (load.prompt_tokens + load.row_tokens) / 2
    environment = turns * load.latency.mean + load.reset_latency.mean
    own = costs.loop.episode + turns * costs.loop.turn
    beside = costs.sampler_beside if load.asynchronous and costs.local else 1.0
    rows = min(flight, sampler.max_rows)
    for _ in range(60):
        together = rows / load.siblings if sampler.shares_prompts else rows
        read = rows * (context - load.prompt_tokens) + together * load.prompt_tokens
        # Steps in which a row comes or goes; rows that are in step with each other do so together.
        changes = 1 - math.exp(-2 * (rows if load.varies else 1.0) / load.turn_tokens.mean)
        step = sampler.seconds(rows=rows, context=read) + sampler.change * changes
        decoding = beside * turns * load.turn_tokens.mean * step
        # What is read for one row holds up all others of the replica that decode meanwhile.
        reading = beside * (suffix * sampler.prefill * max(1.0, rows) + turns * sampler.prefill_step)
        # Siblings in step with each other come to the loop at once, and wait for each other there.
        loop = own * (flight * costs.replicas if not load.varies and not load.asynchronous else 1.0)
        there = decoding + reading
        asking = flight * there / (there + environment + loop)
        rows += 0.5 * (min(asking, sampler.max_rows) - rows)
    queued = max(0.0, flight - sampler.max_rows) / sampler.max_rows * there if flight > sampler.max_rows else 0.0
    queued = max(0.0, queued - environment)
    return EpisodeTime(
        decoding=decoding, reading=reading, environment=environment, loop=loop, rows=max(rows, 1e-9), queued=queued
    )


def _beside(
    load: Workload, costs: Costs, episode: EpisodeTime, trainer: float, loop: float
) -> tuple[EpisodeTime, float]:
    """An episode with its share of publishes, and the step that rollouts allow: each decides the other."""
    row = (load.row_tokens - load.prompt_tokens) / 2 + load.prompt_tokens / load.siblings
    reread = load.in_flight / costs.replicas * row * costs.sampler.prefill
    interruption = costs.storage.publish + reread
    seconds = trainer
    for _ in range(80):
        episode = replace(episode, publishes=0.0)
        episode = replace(episode, publishes=interruption * min(load.rounds_in_flight, episode.total / seconds))
        slowest = episode.total * _slowest(load, episode, load.episodes)
        allowed = max(
            (trainer + slowest) / load.rounds_in_flight,
            load.episodes * episode.total * _slowest(load, episode, load.siblings) / load.in_flight
            if load.concurrency is not None
            else 0.0,
            load.episodes * (episode.decoding + episode.reading) / max(1.0, episode.rows) / costs.replicas + reread,
            loop,
        )
        seconds += 0.3 * (max(trainer, allowed) - seconds)
    return episode, allowed


def _inline(load: Workload, episode: EpisodeTime, loop: float) -> float:
    """The slowest episodes of each wave; of several waves the groups' ends are spread, so that places fill at once."""
    at_once = min(load.in_flight, load.episodes)
    waves = load.episodes / at_once
    tail = episode.total * _slowest(load, episode, at_once)
    if waves <= 1:
        return max(tail, loop)
    group = episode.total * _slowest(load, episode, load.siblings)
    return max(group * (math.ceil(waves) if not load.varies else waves) + (tail - group), loop)


def _slowest(load: Workload, episode: EpisodeTime, count: int) -> float:
    """The slowest of so many episodes over their mean, as of a log-normal time (Blom's expected largest of normals)."""
    if count < 2 or not episode.total:
        return 1.0
    turns = load.turns.mean
    sampled = (episode.decoding + episode.reading) ** 2 * (load.turn_tokens.cv**2 / turns + load.turns.cv**2)
    waited = (turns * load.latency.mean) ** 2 * (load.latency.cv**2 / turns + load.turns.cv**2)
    waited += (load.reset_latency.mean * load.reset_latency.cv) ** 2
    variance = math.log1p((sampled + waited) / episode.total**2)
    largest = NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    return math.exp(math.sqrt(variance) * largest - variance / 2)
