from __future__ import annotations

import asyncio
import pickle
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("textarena")

import textarena

from envgrad import check_environment
from envgrad.environments.adapters import textarena_games
from envgrad.environments.adapters.textarena import TextArenaEnvironment
from envgrad.environments.check.report import Level
from envgrad.environments.isolation import detect_global_draws
from envgrad.environments.policy import use_policy
from envgrad.errors import ConfigurationError, EnvironmentFailure


class Count(textarena.Env):
    """Players add 1 to 3 in turn; who reaches 5 wins. What it does wrong is told by its options."""

    def __init__(self, first: int = 0, players: int = 2, pays: object = 1, ends_at_start: int = 0, wins=None) -> None:
        self.first, self.players, self.pays, self.ends_at_start = first, players, pays, ends_at_start
        self.wins = wins
        self.words = [f"word{number}" for number in range(600)]

    def reset(self, num_players, seed=None):
        assert num_players == self.players, f"there are {self.players} players"
        self.state = textarena.FFAMultiPlayerState(num_players=num_players, seed=seed)
        self.total, self.words[0] = random.randrange(2), f"secret{random.randrange(10**6)}"
        self.state.reset(game_state={"total": self.total}, player_prompt_function=self._prompt)
        self.state.current_player_id = self.first
        if self.ends_at_start and seed % self.ends_at_start:
            self._win(0)

    def _prompt(self, player_id, game_state):
        return f"You are player {player_id}. It stands at {game_state['total']}. Say [1], [2] or [3]."

    def step(self, action):
        mover = self.state.current_player_id
        self.state.add_observation(action, textarena.ObservationType.PLAYER_ACTION, from_id=mover)
        self.total += int(action.strip("[]"))
        self.state.add_observation(f"It stands at {self.total}.", textarena.ObservationType.GAME_MESSAGE)
        if self.total >= 5 or action == self.wins:
            self._win(mover)
        return self.state.step()

    def _win(self, winner):
        outcome = {seat: self.pays if seat == winner else -1 for seat in range(self.players)}
        self.state.set_game_outcome(outcome, f"Player {winner} wins.")


@pytest.fixture(autouse=True)
def count(monkeypatch):
    spec = textarena.envs.registration.EnvSpec(id="Count-v0", entry_point=Count, default_wrappers=None)
    monkeypatch.setitem(textarena.envs.registration.ENV_REGISTRY, "Count-v0", spec)


def seed_at(total, **options):
    """A seed whose game begins at ``total``."""
    episode = TextArenaEnvironment("Count-v0", opponents=["[1]"], **options)()
    for seed in range(50):
        episode.reset(seed=seed)
        if episode.table.game.state.game_state["total"] == total:
            return seed
    raise AssertionError


def test_a_scripted_opponent_and_a_known_end():
    episode = TextArenaEnvironment("Count-v0", opponents=["[1]", "[2]"], instructions="Play well.")()
    system, prompt = episode.reset(seed=seed_at(0))
    assert system == {"role": "system", "content": "Play well."}
    assert prompt["content"] == "You are player 0. It stands at 0. Say [1], [2] or [3]."
    result = episode.step("[1]")
    # Its own words are left out; the other's stand with his name.
    assert result.observation == "It stands at 1.\n[Player 1] [1]\nIt stands at 2." and not result.done
    assert episode.get_reward() == 0.0 and not episode.done
    result = episode.step("[3]")
    assert result.observation.endswith("It stands at 5.\nPlayer 0 wins.") and result.done and episode.done
    assert episode.get_reward() == 1.0


def test_the_others_move_first_where_the_seat_is_not_the_first():
    episode = TextArenaEnvironment("Count-v0", opponents=lambda read: read[-4:-1] and "[2]", seat=1)()
    prompt = episode.reset(seed=seed_at(0))[-1]["content"]
    assert prompt.startswith("You are player 1.") and prompt.endswith("[Player 0] [2]\nIt stands at 2.")
    episode.step("[1]")
    assert episode.done and episode.get_reward() == -1.0  # the other went on to 5


def test_siblings_get_one_game_and_the_process_keeps_its_generators():
    factory = pickle.loads(pickle.dumps(TextArenaEnvironment("Count-v0", opponents="random")))
    first, other = factory(), factory()
    assert first.reset(seed=3) == other.reset(seed=3) and first.start_state() == other.start_state()
    secrets = set()
    for seed in range(4):
        first.reset(seed=seed)
        secrets.add(first.table.game.words[0])
    assert len(secrets) == 4
    assert other.table.game.words[0] in secrets  # lists of words are its own
    assert factory.rules().prototype.words[0] == "word0"
    assert detect_global_draws(lambda: TextArenaEnvironment("Count-v0", opponents="random")) == frozenset()


def test_seats_are_drawn_by_group():
    factory = TextArenaEnvironment("Count-v0", opponents="random", seat="drawn")
    seats = []
    for seed in range(20):
        episode, other = factory(), factory()
        assert episode.reset(seed=seed) == other.reset(seed=seed)
        seats.append(episode.seat)
    assert set(seats) == {0, 1}


def test_the_policy_plays_the_other_seat_in_a_chat_of_its_own():
    asked = []

    async def policy(messages, *, max_tokens=None):
        asked.append(([dict(message) for message in messages], max_tokens))
        return "[1]"

    async def play():
        episode = TextArenaEnvironment("Count-v0", opponents="self", seat=0, instructions="Add.", move_tokens=7)()
        with use_policy(policy):
            await episode.reset(seed=seed_at(0))
            for _ in range(3):
                result = await episode.step("[1]")
            return result, await episode.get_reward()

    result, reward = asyncio.run(play())
    assert result.done and reward == 1.0
    (first, limit), (second, _) = asked
    assert limit == 7 and [message["role"] for message in first] == ["system", "user"]
    assert first[1]["content"].startswith("You are player 1.")
    assert second[:3] == [*first, {"role": "assistant", "content": "[1]"}]
    # It reads what came since, and not its own move.
    assert second[3] == {"role": "user", "content": "It stands at 2.\n[Player 0] [1]\nIt stands at 3."}


class Parts:
    """Answers the other seats, for so many moves, and keeps what they earn."""

    def __init__(self, moves=100):
        self.moves, self.said, self.rewards, self.forgotten = moves, [], {}, []

    async def play(self, part, messages, max_tokens):
        self.said.append((part, len(messages)))
        return "[1]" if len(self.said) <= self.moves else None

    def reward(self, part, reward):
        self.rewards[part] = reward

    def forget(self, part):
        self.forgotten.append(part)


async def by_itself(episode, parts, seed, moves):
    with use_policy(None, parts):
        await episode.reset(seed=seed)
        for _ in range(moves):
            result = await episode.step("[1]")
        return result, await episode.get_reward()


def test_each_seat_of_the_policys_earns_its_own_reward():
    parts = Parts()
    game = TextArenaEnvironment("Count-v0", opponents="self", seat=0)
    result, reward = asyncio.run(by_itself(game(), parts, seed_at(0), 3))
    assert result.done and (reward, parts.rewards) == (1.0, {"seat_1": -1.0})
    assert parts.said == [("seat_1", 1), ("seat_1", 3)]  # its chat goes on
    parts = Parts()
    game = TextArenaEnvironment("Count-v0", opponents="self", seat=1)
    result, reward = asyncio.run(by_itself(game(), parts, seed_at(0), 2))
    assert result.done and (reward, parts.rewards) == (-1.0, {"seat_0": 1.0})


def test_a_game_ends_where_another_seat_has_no_room_left():
    for unfinished in (0.5, None):
        parts = Parts(moves=1)
        episode = TextArenaEnvironment("Count-v0", opponents="self", seat=0, unfinished_reward=unfinished)()
        result, reward = asyncio.run(by_itself(episode, parts, seed_at(0), 2))
        assert result.done and episode.done and not episode.table.over
        assert (reward, parts.rewards) == (unfinished, {"seat_1": unfinished})
    first = TextArenaEnvironment("Count-v0", opponents="self", seat=1)()
    with pytest.raises(EnvironmentFailure, match="no room for the other seats' first moves"):
        asyncio.run(by_itself(first, Parts(moves=0), 1, 0))


def test_what_was_said_in_a_game_that_is_dealt_again_is_forgotten():
    parts = Parts()

    async def play():
        with use_policy(None, parts):
            await TextArenaEnvironment("Count-v0", opponents="self", seat=1, wins="[1]")().reset(seed=1)

    with pytest.raises(EnvironmentFailure, match="16 games of Count-v0"):
        asyncio.run(play())
    assert parts.forgotten == ["seat_0"] * 15  # what the last one said is of an episode that fails


def test_self_play_needs_a_rollout():
    factory = TextArenaEnvironment("Count-v0", opponents="self", seat=1)
    assert TextArenaEnvironment("Count-v0", opponents="self").seat == "drawn"
    with pytest.raises(EnvironmentFailure, match="no policy is being rolled out here"):
        asyncio.run(factory().reset(seed=1))


def test_a_game_that_is_over_at_once_is_dealt_again():
    episode = TextArenaEnvironment("Count-v0", opponents="random", ends_at_start=2)()
    for seed in range(8):
        episode.reset(seed=seed)
        assert not episode.done
    never = TextArenaEnvironment("Count-v0", opponents="random", ends_at_start=1 << 40)()
    with pytest.raises(EnvironmentFailure, match="16 games of Count-v0 in a row were over before seat 0"):
        never.reset(seed=1)


def test_an_opponent_that_ends_every_game_at_once_leaves_the_first_move():
    drawn = TextArenaEnvironment("Count-v0", opponents=["[9]"], seat="drawn")
    for seed in range(10):
        episode = drawn()
        episode.reset(seed=seed)
        assert (episode.seat, episode.done) == (0, False)
    with pytest.raises(EnvironmentFailure, match="before seat 1 had its first turn; choose another seat"):
        TextArenaEnvironment("Count-v0", opponents=["[9]"], seat=1)().reset(seed=1)


def test_rewards_become_numbers():
    import numpy

    for pays, expected in ((numpy.float32(0.5), 0.5), (True, 1.0), ("2", 2.0)):
        episode = TextArenaEnvironment("Count-v0", opponents=["[1]"], pays=pays)()
        episode.reset(seed=1)
        episode.step("[9]")
        assert episode.get_reward() == expected and type(episode.get_reward()) is float
    episode = TextArenaEnvironment("Count-v0", opponents=["[1]"], pays="much")()
    episode.reset(seed=1)
    episode.step("[9]")
    with pytest.raises(EnvironmentFailure, match=r"ended with the rewards {0: 'much', 1: -1} for seat 0"):
        episode.get_reward()
    episode.table.info[0]["invalid_move"] = True
    assert episode.get_reward() == textarena_games.INVALID_MOVE


def test_unfinished_games_are_worth_what_is_said():
    for given in (0.0, -1.0, None):
        episode = TextArenaEnvironment("Count-v0", opponents=["[1]"], unfinished_reward=given)()
        episode.reset(seed=1)
        episode.step("[1]")
        assert episode.get_reward() == given


def test_endless_others_are_a_failure(monkeypatch):
    episode = TextArenaEnvironment("Count-v0", opponents=["[0]"])()
    episode.reset(seed=1)
    monkeypatch.setattr(episode.table.game.state, "step", lambda: (False, {}))
    episode.table.game.state.current_player_id = 1
    with pytest.raises(EnvironmentFailure, match="500 moves in a row were not the agent's"):
        episode._play(episode._others())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Count-v0 has 2 seats: say by opponents= who plays the others"),
        ({"opponents": "clever"}, "the player 'clever' of seat 1 must be"),
        ({"opponents": []}, r"the player \[\] of seat 1 must be"),
        ({"opponents": {0: "random"}}, r"players for the seats \[0\]; Count-v0 needs them for \[1\], the agent's is 0"),
        ({"opponents": "random", "seat": 2}, "seat=2 must be a seat of Count-v0, from 0 to 1, or 'drawn'"),
        ({"opponents": "random", "players": 3}, "cannot be started with 3 players; 3: AssertionError: there are 2"),
        ({"opponents": "random", "move_tokens": 5}, "move_tokens=5 cannot act"),
        ({"opponents": "random", "determinism": "task"}, "must be one of fixed, seeded, none"),
        ({"opponents": "random", "color": 1}, r"cannot be made with {'color': 1}: TypeError"),
    ],
)
def test_what_cannot_work_is_said_at_construction(options, words):
    with pytest.raises(ConfigurationError, match=words):
        TextArenaEnvironment("Count-v0", **options)


def test_an_unknown_game_and_a_game_with_one_seat():
    with pytest.raises(ConfigurationError, match=r"no game 'Wordl-v0' \(did you mean .*Wordle-v0"):
        TextArenaEnvironment("Wordl-v0")
    with pytest.raises(ConfigurationError, match="cannot act: GuessTheNumber-v0 has one seat"):
        TextArenaEnvironment("GuessTheNumber-v0", opponents="random")


def test_nothing_is_downloaded(monkeypatch):
    import nltk

    called = []
    monkeypatch.setattr(nltk, "download", called.append)

    def make(game, **options):
        nltk.download("words")
        raise LookupError("Resource words not found: nltk.download('words')")

    monkeypatch.setattr(textarena, "make", make)
    with pytest.raises(ConfigurationError, match=r"needs word lists of nltk.*python -m nltk.downloader words"):
        TextArenaEnvironment("Wordle-v0")
    assert not called
    nltk.download("words")
    assert called == ["words"]  # it is as before


def test_views_that_repeat_themselves_are_cut():
    class Whole(textarena.ObservationWrapper):
        def observation(self, player_id, observation):
            self.seen = getattr(self, "seen", "") + "".join(f"{message}\n" for _, message, _ in observation)
            return self.seen

    spec = textarena.envs.registration.EnvSpec(id="Whole-v0", entry_point=Count, default_wrappers=[Whole])
    textarena.envs.registration.ENV_REGISTRY["Whole-v0"] = spec
    try:
        episode = TextArenaEnvironment("Whole-v0", opponents=["[0]"])()
        assert episode.reset(seed=1)[-1]["content"].startswith("You are player 0.")
        observation = episode.step("[1]").observation
        assert "You are player 0" not in observation and observation.count("stands at") >= 1
    finally:
        del textarena.envs.registration.ENV_REGISTRY["Whole-v0"]


def test_real_games_pay_for_what_is_right():
    episode = TextArenaEnvironment("GuessTheNumber-v0")()
    episode.reset(seed=4)
    hidden = episode.table.game.state.game_state["game_number"]
    assert episode.step(f"[{hidden}]").done and episode.get_reward() == 1.0
    match = TextArenaEnvironment("TicTacToe-v0", opponents=["[0]", "[1]"])()
    match.reset(seed=4)
    results = [match.step(move) for move in ("[3]", "[4]", "[5]")]
    assert [result.done for result in results] == [False, False, True] and match.get_reward() == 1.0


def test_the_contract_is_kept():
    for opponents in ("random", "self"):  # in a check, somebody without a clue stands in for the policy
        report = check_environment(TextArenaEnvironment("TicTacToe-v0", opponents=opponents))
        assert not [one for one in report.findings if one.level is Level.BREACH], report


def test_the_message_parts_are_found_in_any_order():
    kind = SimpleNamespace(name="PLAYER_ACTION")
    assert (
        textarena_games._parts((kind, 0, "go")) == textarena_games._parts((0, "go", kind)) == (0, "go", "PLAYER_ACTION")
    )
