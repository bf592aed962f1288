"""Every game of TextArena, played by scripts: equal episodes for one group, and the rewards that are known."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

from envgrad.environments.adapters.textarena import TextArenaEnvironment
from envgrad.environments.sources import hash63
from envgrad.errors import ConfigurationError, EnvironmentFailure
from helpers.ecosystems import WHOLE, Sibling, play_together
from helpers.word_lists import build_word_lists

pytest.importorskip("textarena")

GAMES = json.loads((Path(__file__).parent / "textarena_games.json").read_text(encoding="utf-8"))
"""for each game: ``players``, and of both scripts the turns and the reward; or ``fault``: why it cannot be played"""
ALWAYS = (
    "2048-v0", "Blackjack-v0", "Cryptarithm-v0", "FrozenLake-v0", "GuessTheNumber-v0", "Mastermind-v0", "Secretary-v0",
    "ThreeCardMonte-v0", "TowerOfHanoi-v0", "WordSearch-v0", "Battleship-v0", "ConnectFour-v0", "KuhnPoker-v0",
    "LiarsDice-v0", "Nim-v0", "Othello-v0", "SpiteAndMalice-v0", "TicTacToe-v0", "ThreePlayerGOPS-v0", "Codenames-v0",
    "PublicGoodsGame-v0", "SecretMafia-v0", "Klondike-v0", "CharacterConclave-v0", "GuessWho-v0",
)  # fmt: skip
"""the part that is played in every run of the tests"""
MOST_TURNS = 60
OPTION = re.compile(r"\[[^\[\]\n]{1,40}\]")


def draw(read: list[str], generator: random.Random) -> str:
    """Something in square brackets out of what was read last."""
    for text in reversed(read):
        if options := sorted(set(OPTION.findall(text))):
            return generator.choice(options)
    return "[0]"


def junk(read: list[str], generator: random.Random) -> str:
    return "[zzz]"


SCRIPTS = {"draw": draw, "junk": junk}


@pytest.fixture(scope="module", autouse=True)
def word_lists(tmp_path_factory):
    import nltk

    folder = build_word_lists(tmp_path_factory.mktemp("nltk"))
    nltk.data.path.insert(0, str(folder))
    yield
    nltk.data.path.remove(str(folder))


def make(game: str) -> TextArenaEnvironment:
    opponents = None if GAMES[game].get("players") == 1 else "random"
    return TextArenaEnvironment(game, opponents=opponents)


def play(game: str) -> dict[str, object]:
    """Both scripts' episodes, each by two siblings and a third of another group between them."""
    factory = make(game)
    found: dict[str, object] = {"players": factory.players}
    for name, player in SCRIPTS.items():
        first, other = (Sibling(factory(), hash63("group", 1), player) for _ in range(2))
        stranger = Sibling(factory(), hash63("group", 2), player)
        play_together([first, stranger, other], MOST_TURNS)
        assert first.log == other.log and first.reward == other.reward, f"{game}: siblings differ"
        assert first.episode.done == first.over
        reward = first.reward
        found[name] = {"turns": first.turns, "over": first.over, "reward": None if reward is None else round(reward, 6)}
    return found


@pytest.mark.parametrize("game", [game for game in GAMES if WHOLE or game in ALWAYS])
def test_a_game(game: str) -> None:
    known = GAMES[game]
    if "fault" in known:
        with pytest.raises((ConfigurationError, EnvironmentFailure, TypeError), match=known["error"]):
            TextArenaEnvironment(game) if known.get("made") is False else play(game)
        return
    if known.get("python") and sys.version_info[:2] < tuple(map(int, known["python"].split("."))):
        with pytest.raises(ConfigurationError, match="SyntaxError"):
            make(game)
        return
    found = play(game)
    assert found == {key: known[key] for key in ("players", *SCRIPTS)}


def test_counts() -> None:
    playable = [game for game, known in GAMES.items() if "fault" not in known]
    assert (len(GAMES), len(playable)) == (96, 85)
    # Nonsense never earns more than a draw from the options, but where the other player bids too much against it.
    better = [g for g in playable if GAMES[g]["junk"]["reward"] > max(0.0, GAMES[g]["draw"]["reward"])]
    assert set(better) <= {"SimpleBlindAuction-v0"}
