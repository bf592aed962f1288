"""The ten environments with discrete actions of Gymnasium's base install: known returns of known actions."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest

from envgrad.environments.adapters.gymnasium import GymnasiumEnvironment
from envgrad.environments.sources import hash63

pytest.importorskip("gymnasium")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A game, a script for it, and what must come of it."""

    game: str
    script: tuple[str, ...]
    """repeated until the end"""
    ending: str
    """``terminated`` or ``truncated``"""
    total: float | None = None
    """the return; None: it depends on the seed"""
    steps: int | None = None


FIXED = {"is_slippery": False}
GAMES = [
    # A pole that is pushed one way falls within a dozen steps, each of which pays 1.
    Known(game="CartPole-v0", script=("left",), ending="terminated"),
    Known(game="CartPole-v1", script=("right",), ending="terminated"),
    # Without swinging, the car stays in the valley until the limit.
    Known(game="MountainCar-v0", script=("none",), ending="truncated", total=-200.0, steps=200),
    Known(game="Acrobot-v1", script=("none",), ending="truncated", total=-500.0, steps=500),
    Known(game="Blackjack-v1", script=("stick",), ending="terminated", steps=1),
    Known(
        game="FrozenLake-v1", ending="terminated", total=1.0, steps=6,
        script=("down", "down", "right", "right", "down", "right"),
    ),
    Known(
        game="FrozenLake8x8-v1", ending="terminated", total=1.0, steps=14,
        script=("right",) * 7 + ("down",) * 7,
    ),
    # Along the cliff: up, eleven to the right, down.
    Known(game="CliffWalking-v1", ending="terminated", total=-13.0, steps=13, script=("up", *("right",) * 11, "down")),
    Known(game="CliffWalkingSlippery-v1", ending="", script=("up", "right")),
    # A taxi that drives on for ever.
    Known(game="Taxi-v4", script=("north",), ending="truncated", total=-200.0, steps=200),
]  # fmt: skip


@pytest.mark.parametrize("known", GAMES, ids=lambda known: known.game)
def test_a_game(known: Known) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CartPole-v0 is an old version
        factory = GymnasiumEnvironment(known.game, **(FIXED if known.game.startswith("Frozen") else {}))
        first, other, stranger = factory(), factory(), factory()
    seed = hash63("group", 1)
    assert first.reset(seed=seed) == other.reset(seed=seed)
    assert repr(first.start_state()) == repr(other.start_state())  # arrays
    stranger.reset(seed=hash63("group", 2))
    total = 0.0
    for step in range(600):
        action = known.script[step % len(known.script)]
        result = first.act(action)
        if not stranger.done:
            stranger.act(action)
        assert other.act(action) == result
        total += result.reward
        if first.done:
            break
    assert (first.terminated, first.truncated) == (other.terminated, other.truncated)
    if known.ending:
        assert first.terminated == (known.ending == "terminated") and first.truncated == (known.ending == "truncated")
    assert known.total in (None, total) and known.steps in (None, first.steps)
    if known.game.startswith("CartPole"):
        assert total == first.steps < 15
    if known.game.startswith("Blackjack"):
        assert total in (-1.0, 0.0, 1.0)
    for episode in (first, other, stranger):
        episode.close()
