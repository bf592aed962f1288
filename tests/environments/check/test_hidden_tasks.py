from __future__ import annotations

from envgrad import check_environment
from envgrad.environments.check.report import Determinism, Rule


class Behind:
    """Behind a server: what it hides is not on the instance, and openings are alike."""

    determinism = "seeded"
    _far_away: dict[int, int] = {}

    def reset(self, seed: int) -> str:
        Behind._far_away[id(self)] = seed % 1000
        return "Guess a number from 0 to 999."

    def guess(self, number: int) -> str:
        """Guess."""
        hidden = Behind._far_away[id(self)]
        return "right" if number == hidden else "higher" if hidden > number else "lower"

    def start_state(self) -> dict[str, int]:
        return {}

    def get_reward(self) -> float:
        return 0.0


def test_tasks_that_only_episodes_tell_apart_are_told_apart() -> None:
    for seed in range(3):
        report = check_environment(Behind, groups=1, turns=5, seed=seed)
        assert report.determinism is Determinism.SEEDED, str(report)
        assert not report.of(Rule.IDS_IGNORED) and not report.of(Rule.DETERMINISM)
