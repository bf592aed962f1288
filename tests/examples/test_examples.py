from __future__ import annotations

import copy
import importlib
import itertools
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from envgrad.environments.contract import inspect_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = ("compass", "guess_number", "wordle", "chess_puzzles", "two_envs", "reasoning")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def page(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PAGES)
def test_each_page_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 70


@pytest.mark.parametrize("name", PAGES)
def test_each_page_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = page(name)
    small(module, monkeypatch)
    module.main(output_dir=str(tmp_path), max_steps=2)  # type: ignore[attr-defined]
    assert any(tmp_path.rglob("*.safetensors"))


def small(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own options, with fewer episodes."""
    config = module.GRPOConfig  # type: ignore[attr-defined]

    def with_fewer(**options: object) -> object:
        return config(**{**options, "per_device_train_batch_size": 8, "num_generations": 4, "eval_tasks": 4})

    monkeypatch.setattr(module, "GRPOConfig", with_fewer)


def test_guess_number_tells_the_side() -> None:
    env = page("guess_number").GuessNumber()
    env.reset(seed=3)
    assert env.hidden == random.Random(3).randint(1, 16)
    env.hidden = 9
    assert (env.guess(8), env.guess(10)) == ("higher", "lower")
    assert not env.done
    assert (env.guess(9), env.done, env.get_reward()) == ("correct", True, 1.0)


@pytest.mark.parametrize("hidden", range(1, 17))
def test_guess_number_can_always_be_solved(hidden: int) -> None:
    env = page("guess_number").GuessNumber()
    env.reset(seed=0)
    env.hidden = hidden
    low, high = 1, 16
    while not env.done:
        middle = (low + high) // 2
        reply = env.guess(middle)
        low, high = (middle + 1, high) if reply == "higher" else (low, middle - 1)
    assert env.get_reward() == 1.0


def test_guess_number_ends_after_five() -> None:
    env = page("guess_number").GuessNumber()
    env.reset(seed=0)
    env.hidden = 16
    assert [env.guess(1) and env.done for _ in range(5)] == [False] * 4 + [True]
    assert env.get_reward() == 0.0


def test_wordle_marks_letters() -> None:
    env = page("wordle").Wordle(seed=0)
    env.reset()
    env.secret = "tea"
    assert env.guess("ten") == "right right absent"
    assert env.guess("ate") == "elsewhere elsewhere elsewhere"
    assert (env.guess("TEA"), env.done, env.get_reward()) == ("right right right", True, 1.0)
    with pytest.raises(ValueError, match="not 4"):
        env.guess("team")


def test_wordle_made_again_draws_the_same_words() -> None:
    wordle = page("wordle").Wordle

    def secrets() -> list[str]:
        wordle.made = itertools.count()
        games, found = [wordle() for _ in range(3)], []
        for game in games * 2:
            game.reset()
            found.append(game.secret)
        return found

    first = secrets()
    assert first == secrets() and len(set(first)) > 2


def test_wordle_words() -> None:
    words = page("wordle").WORDS
    assert len(set(words)) == len(words) == 40
    assert all(len(word) == 3 and word.isalpha() and word.islower() for word in words)


def test_wordle_draws_by_itself_and_is_forked() -> None:
    wordle = page("wordle").Wordle
    spec, _ = inspect_environment("wordle", wordle)
    assert not spec.uses_task_identity
    env = wordle(seed=1)
    words = {env.reset() and env.secret for _ in range(200)}
    assert len(words) > 30
    twin = copy.deepcopy(env)
    assert (twin.secret, twin.guess("cat")) == (env.secret, env.guess("cat"))


def test_chess_positions_come_from_the_group_and_have_a_mate() -> None:
    chess_puzzles = page("chess_puzzles")
    fens = set()
    for group_id in range(20):
        env, sibling = chess_puzzles.MateInOne(), chess_puzzles.MateInOne()
        assert env.reset(group_id=group_id) == sibling.reset(group_id=group_id)
        fens.add(env.board.fen())
        mates = [move for move in env.board.legal_moves if chess_puzzles.mates(env.board, move)]
        assert (env.play(mates[0].uci()), env.done, env.get_reward()) == ("mate", True, 1.0)
    assert len(fens) == 20


def test_chess_moves_are_judged_by_the_library() -> None:
    chess_puzzles = page("chess_puzzles")
    env = chess_puzzles.MateInOne()
    env.reset(group_id=1)
    env.board = chess_puzzles.chess.Board("k7/8/1K6/8/8/8/8/Q6R w - - 0 1")
    assert (env.play("a1a9"), env.play("a1b3"), env.done) == ("not legal", "not legal", False)
    assert (env.play("h1h2"), env.done, env.get_reward()) == ("no mate", True, 0.0)


def test_chess_tries_are_counted() -> None:
    env = page("chess_puzzles").MateInOne()
    env.reset(group_id=1)
    assert [env.play("nonsense") and env.done for _ in range(3)] == [False, False, True]
    assert env.get_reward() == 0.0


def test_chess_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chess", None)
    monkeypatch.delitem(sys.modules, "chess_puzzles", raising=False)
    with pytest.raises(SystemExit, match="pip install chess"):
        page("chess_puzzles")
