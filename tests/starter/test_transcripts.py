from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from envgrad.environments.arguments import fit
from envgrad.errors import ConfigurationError
from envgrad.starter.transcripts import Chat, Game, draw_chat, load_games, play_blindly
from envgrad.types import Message

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def games() -> dict[str, Game]:
    return load_games(EXAMPLES)


def calls(chat: Chat) -> list[Message]:
    return [call["function"] for message in chat.messages for call in message.get("tool_calls", ())]


def test_every_call_fits_a_tool_that_is_shown(games: dict[str, Game]) -> None:
    rng = random.Random(1)
    kinds: Counter[bool] = Counter()
    for _ in range(300):
        chat = draw_chat(rng, games)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}  # type: ignore[index]
        kinds[bool(schemas)] += 1
        for call in calls(chat):
            assert fit(call["arguments"], schemas[call["name"]], "arguments")[1] is None
            assert set(schemas[call["name"]]["required"]) <= set(call["arguments"])
            assert set(call["arguments"]) <= set(schemas[call["name"]]["properties"])
    assert kinds[True] > 250
    assert kinds[False] > 0


def test_each_call_is_answered(games: dict[str, Game]) -> None:
    rng = random.Random(2)
    for _ in range(100):
        roles = [message["role"] for message in draw_chat(rng, games).messages]
        opening = 2 if roles[0] == "system" else 1
        assert roles[opening - 1] == "user"
        assert len(set(roles[opening::2])) <= 1
        assert roles.count("tool") in (0, roles.count("assistant"))


class Told:
    """Answers the same to every action."""

    def __init__(self, reply: str) -> None:
        self.reply = reply
        self.turns = 0

    @property
    def done(self) -> bool:
        return self.turns >= 6

    def act(self, direction: str = "", number: int = 0, word: str = "") -> str:
        """
        Act.

        Args:
            direction: Any.
            number: Any.
            word: Any.
        """
        self.turns += 1
        return self.reply


@pytest.mark.parametrize("name", ["compass", "guess_number", "wordle"])
def test_actions_do_not_depend_on_replies(games: dict[str, Game], name: str) -> None:
    def actions(reply: str) -> list[object]:
        def make(rng: random.Random) -> tuple[Told, str]:
            return Told(reply), "Go."

        game = Game(factory=Told, make=make, tool="act", draw=games[name].draw)
        return [call["arguments"] for call in calls(play_blindly(random.Random(3), game))]

    assert actions("north") == actions("south") == actions("lower")
    assert len(actions("north")) == 6


def test_now_and_then_a_reply_is_an_error_and_costs_no_move(games: dict[str, Game]) -> None:
    rng = random.Random(7)
    replies: Counter[str] = Counter()
    for _ in range(300):
        messages = play_blindly(rng, games["compass"]).messages
        found = [message["content"] for message in messages if message["role"] == "tool"]
        errors = [reply for reply in found if reply.startswith(("malformed tool call", "Unknown tool", "move:"))]
        played = len(found) - len(errors)
        assert played <= 6
        assert played == 6 or found[-1] == "goal"
        replies.update(error=len(errors), move=played)
    assert 0.02 < replies["error"] / replies.total() < 0.1


@pytest.mark.parametrize(("name", "choices"), [("compass", 4), ("guess_number", 16), ("wordle", 40)])
def test_actions_are_uniform(games: dict[str, Game], name: str, choices: int) -> None:
    rng = random.Random(4)
    draws = 400 * choices
    counts = Counter(str(games[name].draw(rng)) for _ in range(draws))
    assert len(counts) == choices
    # Chi-squared with choices - 1 degrees of freedom; five deviations above its mean.
    statistic = sum((count - 400) ** 2 / 400 for count in counts.values())
    assert statistic < (choices - 1) + 5 * (2 * (choices - 1)) ** 0.5


def test_a_seed_decides_everything(games: dict[str, Game]) -> None:
    def drawn(seed: int) -> list[Chat]:
        rng = random.Random(seed)
        return [draw_chat(rng, games) for _ in range(40)]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_a_folder_without_the_examples(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--examples"):
        load_games(tmp_path)
