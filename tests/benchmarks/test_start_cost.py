from __future__ import annotations

from benchmarks.start_cost import Cost, measure, table


def test_the_comparison_is_watched_in_a_real_run() -> None:
    cost = measure("compass.py:Compass", 1)
    assert cost.groups == 8 and 0 < cost.comparing < cost.training


def test_the_table() -> None:
    row = table([Cost(environment="game.py:Game", groups=8, comparing=0.004, training=2.0)]).splitlines()[-1]
    assert row == "| Game | 0.50 ms | 0.20% |"
