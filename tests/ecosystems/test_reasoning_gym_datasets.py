"""Every dataset of reasoning-gym: its own oracle scores 1 and nonsense less, by episodes of two siblings."""

from __future__ import annotations

import pytest

from envgrad.environments.adapters.reasoning_gym import FAULTY, ReasoningGymEnvironment
from envgrad.environments.sources import hash63
from helpers.ecosystems import WHOLE

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS

NAMES = sorted(set(DATASETS) - {"composite"})
"""``composite`` is a mixture of others"""
ALWAYS = NAMES[::4]
SLOW = frozenset({"arc_agi", "futoshiki", "knight_swap", "sokoban", "acre", "puzzle24", "intermediate_integration"})
"""seconds for some items"""
WITHOUT_ORACLE = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
NONSENSE = ("I do not know", "xyzzy", "")
PAYS_NONSENSE = frozenset(FAULTY)


def entries(name: str) -> list:
    """Some episodes, each started by two siblings."""
    factory = ReasoningGymEnvironment(name, items=500 if name == "acre" else 20_000)
    found = []
    for group in range(1 if name in SLOW else 3):
        first, other = factory(), factory()
        seed = hash63("group", group)
        assert first.reset(seed=seed) == other.reset(seed=seed)
        assert first.start_state() == other.start_state()
        found.append(first)
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if WHOLE or (name in ALWAYS and name not in SLOW)])
def test_a_dataset(name: str) -> None:
    for episode in entries(name):
        oracle = episode.entry["answer"]
        assert (oracle is None) == (name in WITHOUT_ORACLE)
        scores = [episode.step(text).reward for text in NONSENSE]
        assert all(0.0 <= score <= 1.0 for score in scores)
        if oracle is None:
            assert max(scores) < 1.0
            continue
        assert episode.step(oracle).reward == 1.0
        assert (max(scores) == 1.0) if name in PAYS_NONSENSE else (max(scores) < 1.0), (name, scores)


def test_counts() -> None:
    assert len(NAMES) == 105 and set(NAMES) >= WITHOUT_ORACLE | PAYS_NONSENSE | SLOW
    assert len(PAYS_NONSENSE) == 1  # 104 tell an answer from nonsense
