from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.starter.compass import HELD_OUT, MAX_MOVES, STEPS, TASKS, Compass, baselines, bearing, draw_task, walk


def started(seed: int) -> Compass:
    env = Compass()
    env.reset(seed=seed)
    return env


def test_all_tasks_are_two_or_three_steps_apart() -> None:
    # Ordered pairs of cells of a 4x4 grid by distance: 48 at 1, 68 at 2, 64 at 3, 60 farther: 240 in all.
    distances = [abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in TASKS]
    assert {d: distances.count(d) for d in set(distances)} == {2: 68, 3: 64}


@given(st.integers(0, 2**63 - 1))
def test_the_seed_alone_decides_the_task(seed: int) -> None:
    first, second = started(seed), started(seed)
    assert (first.cell, first.goal) == (second.cell, second.goal) == draw_task(seed)
    assert not first.done
    assert first.get_reward() == 0.0


@given(st.integers(0, 2**63 - 1), st.sampled_from(list(STEPS)))
def test_whoever_reads_the_replies_always_succeeds(seed: int, blind: str) -> None:
    env = started(seed)
    reply = env.move(blind)  # type: ignore[arg-type]
    while not env.done:
        reply = env.move(reply.split()[-1])  # type: ignore[arg-type]
    assert (reply, env.get_reward()) == ("goal", 1.0)
    assert env.moves <= MAX_MOVES


def test_the_opening_says_nothing_of_the_task() -> None:
    assert len({Compass().reset(seed=seed) for seed in range(50)}) == 1


def test_walls_hold_and_six_moves_end_the_episode() -> None:
    env = started(5)
    env.cell, env.goal = (0, 0), (3, 3)
    replies = [env.move("west") for _ in range(6)]
    assert replies == ["east north"] * 6
    assert (env.cell, env.done, env.get_reward()) == ((0, 0), True, 0.0)


def test_bearing_names_only_axes_that_differ() -> None:
    assert bearing((1, 1), (3, 0)) == "east south"
    assert bearing((1, 1), (0, 1)) == "west"
    assert bearing((1, 1), (1, 3)) == "north"
    assert bearing((1, 1), (1, 1)) == ""


def test_baselines_equal_playing_every_sequence() -> None:
    seeds = [3, 5, 5, 8, 13, 21]
    tasks = [draw_task(seed) for seed in seeds]

    def success(sequence: tuple[str, ...]) -> list[bool]:
        solved = []
        for start, goal in tasks:
            cells = itertools.accumulate(sequence, lambda cell, way: walk(cell, way), initial=start)  # type: ignore[arg-type]
            solved.append(goal in list(cells))
        return solved

    rates = {s: sum(success(s)) / len(tasks) for s in itertools.product(STEPS, repeat=MAX_MOVES)}
    found = baselines(seeds)
    assert found.reply_blind == max(rates.values())
    assert found.constant == max(rates[(way,) * MAX_MOVES] for way in STEPS)
    assert found.random == pytest.approx(sum(rates.values()) / len(rates))


def test_no_policy_without_replies_comes_near_on_all_tasks() -> None:
    seeds = {draw_task(seed): seed for seed in range(5000)}
    held_out = {draw_task(seed, "eval"): seed for seed in range(5000)}
    assert set(seeds) | set(held_out) == set(TASKS) and not set(seeds) & set(held_out)
    assert set(held_out) == set(HELD_OUT) and len(HELD_OUT) == len(TASKS) // 4
    for found in (baselines(seeds.values()), baselines(held_out.values(), "eval")):
        assert 0.15 < found.random < 0.25
        assert found.constant < 0.2
        assert found.reply_blind < 0.5


def test_baselines_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one seed"):
        baselines([])
