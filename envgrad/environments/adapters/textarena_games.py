"""TextArena's games: made once and copied, read seat by seat, and never allowed to download anything."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from envgrad.environments.adapters.extras import require
from envgrad.environments.boundary import Raised, guard
from envgrad.environments.isolation import detect_global_draws
from envgrad.errors import ConfigurationError, EnvironmentFailure

MOST_PLAYERS = 15
INVALID_MOVE = -1.0
"""what TextArena pays for a lost game after an invalid move, where the game does not say"""
_WORDS = 500
"""longer lists of strings are word lists: copied as a whole"""
_SEED_BITS = 32
"""what numpy's global generator takes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameRules:
    """One game of TextArena as it is made, with the number of its players."""

    game: str
    options: Mapping[str, object]
    players: int
    prototype: Any
    """a game that was never reset"""

    def fresh(self) -> Any:
        """A game of its own: no game is reset twice, so that nothing of the last one is left."""
        memo: dict[int, Any] = {}
        for value in vars(base_game(self.prototype)).values():
            if type(value).__name__ == "EnglishDictionary":  # large, and only read
                memo[id(value)] = value
            elif _is_words(value):
                memo[id(value)] = copy.copy(value)
        copied = guard(copy.deepcopy, self.prototype, memo)
        return make_game(self.game, self.options) if isinstance(copied, Raised) else copied.value


def load_rules(game: str, players: int | None, options: Mapping[str, object]) -> GameRules:
    """Make ``game`` once, and find out for how many players it is if that is not said.

    Raises:
        ConfigurationError: textarena is not installed; there is no such game; it refuses the options or the number of
            players; it needs word lists that are not there.
    """
    package = require("textarena", extra="textarena", what="TextArenaEnvironment")
    known = package.envs.registration.ENV_REGISTRY
    if game not in known:
        import difflib

        close = difflib.get_close_matches(str(game), known, n=3)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ConfigurationError(f"TextArena has no game {game!r}{hint}")
    made: list[Any] = []
    detect_global_draws(lambda: made.append(make_game(game, options)))
    prototype = made[0]
    _sort_words(prototype)
    refused: list[str] = []
    for count in _counts(prototype) if players is None else [players]:
        rules = GameRules(game=game, options=options, players=count, prototype=prototype)
        outcomes: list[Any] = []
        detect_global_draws(lambda: outcomes.append(guard(_try_reset, rules)))  # noqa: B023
        if not isinstance(outcomes[0], Raised):
            return rules
        refused.append(f"{count}: {type(outcomes[0].error).__name__}: {outcomes[0].error}")
    raise ConfigurationError(
        f"TextArena's {game} cannot be started with {'any number of' if players is None else players} players; "
        f"{refused[0]}" + (f"; {refused[1]}" if len(refused) > 1 else "")
    )


def _sort_words(prototype: Any) -> None:
    """Put word lists in order: some games make theirs of sets, whose order is another one in every process."""
    for value in vars(base_game(prototype)).values():
        if isinstance(value, list) and _is_words(value):
            value.sort()


def _is_words(value: object) -> bool:
    """Whether it is a long list, set or tuple of strings."""
    plain = type(value) in (list, set, tuple, frozenset)
    return plain and len(value) > _WORDS and all(isinstance(word, str) for word in value)  # type: ignore[arg-type, attr-defined]


def _counts(prototype: Any) -> list[int]:
    """Numbers of players to try, the game's own default first."""
    default = getattr(base_game(prototype), "default_num_players", None)
    return [*([default] if isinstance(default, int) else []), *range(1, MOST_PLAYERS + 1)]


def _try_reset(rules: GameRules) -> None:
    table = Table(rules=rules, seed=1)
    state = base_game(table.game).state
    if rules.players == 1 and type(state).__name__ != "SinglePlayerState":
        raise ValueError("it is for several players")  # some games start with one all the same, and then never end
    if getattr(state, "num_players", rules.players) != rules.players:
        raise ValueError(f"it seats {state.num_players}")
    table.look()


def make_game(game: str, options: Mapping[str, object]) -> Any:
    """
    Raises:
        ConfigurationError: the game cannot be made.
    """
    package = require("textarena", extra="textarena", what="TextArenaEnvironment")
    with _no_downloads():
        made = guard(package.make, game, **options)
    if not isinstance(made, Raised):
        return made.value
    if isinstance(made.error, LookupError) and "nltk" in str(made.error).lower():
        raise ConfigurationError(
            f"TextArena's {game} needs word lists of nltk that are not on this machine: run 'python -m nltk.downloader "
            "words averaged_perceptron_tagger_eng', or point NLTK_DATA to a folder that has them"
        ) from made.error
    raise ConfigurationError(
        f"TextArena's {game} cannot be made with {dict(options)}: {type(made.error).__name__}: {made.error}"
    ) from made.error


@contextmanager
def _no_downloads() -> Iterator[None]:
    """Games ask nltk to download word lists whenever one is made; here they find them or fail."""
    nltk = require("nltk", extra="textarena", what="TextArenaEnvironment")
    names = vars(nltk)
    before, names["download"] = names["download"], _found_here
    try:
        yield
    finally:
        names["download"] = before


def _found_here(*args: object, **kwargs: object) -> bool:
    return True


def base_game(game: Any) -> Any:
    """The game inside its wrappers."""
    package = sys.modules["textarena"]
    while isinstance(game, package.Wrapper):
        game = game.env
    return game


def _rewrites(game: Any) -> bool:
    """Whether a wrapper shows the players something else than all messages in their order."""
    package = sys.modules["textarena"]
    while isinstance(game, package.Wrapper):
        if isinstance(game, package.ObservationWrapper) and type(game).__name__ != "LLMObservationWrapper":
            return True
        game = game.env
    return False


@dataclass(slots=True, kw_only=True)
class Table:
    """One game in play: who moves, what each seat has read, and how it ended."""

    rules: GameRules
    seed: int
    game: Any = field(init=False)
    over: bool = field(init=False, default=False)
    seat: int = field(init=False, default=0)
    """whose turn it is"""
    read: dict[int, list[str]] = field(init=False)
    """what each seat was shown, piece by piece"""
    rewards: Mapping[int, Any] | None = field(init=False, default=None)
    info: Mapping[int, Any] = field(init=False, default_factory=dict)
    _cumulative: bool = field(init=False)
    _said: dict[int, str] = field(init=False, default_factory=dict)
    _shown: dict[int, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.game = self.rules.fresh()
        self.read = {seat: [] for seat in range(self.rules.players)}
        self._cumulative = _rewrites(self.game)
        # The games draw from the process-global generators; numpy's they do not even seed.
        seed = self.seed % (1 << _SEED_BITS)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        with _no_downloads():
            self.game.reset(num_players=self.rules.players, seed=seed)
        self.over = bool(getattr(base_game(self.game).state, "done", False))
        if self.over:
            self._end()

    def look(self) -> int:
        """Read the seat whose turn it is; its number."""
        if self.over:
            return self.seat
        seat, seen = (self.game if self._cumulative else base_game(self.game)).get_observation()
        if seat not in self.read:
            raise EnvironmentFailure(f"{self.rules.game} gives the turn to player {seat} of {self.rules.players}")
        self.seat = int(seat)
        text = self._news(seat, seen) if self._cumulative else self._messages(seat, seen)
        if text:
            self.read[seat].append(text)
        return self.seat

    def move(self, text: str) -> None:
        """The seat whose turn it is acts."""
        self._said[self.seat] = text
        done, _ = self.game.step(action=text)
        self.over = bool(done)
        if self.over:
            self._end()

    def reward(self, seat: int) -> float | None:
        """What the game paid ``seat``; None before its end.

        Raises:
            EnvironmentFailure: it ended without a number for this seat.
        """
        if not self.over:
            return None
        value = None if self.rewards is None else self.rewards.get(seat)
        number = guard(float, value)
        if isinstance(number, Raised):
            told = self.info.get(seat) if isinstance(self.info, Mapping) else None
            if isinstance(told, Mapping) and told.get("invalid_move"):  # a game that mixed reward and reason up
                return INVALID_MOVE
            raise EnvironmentFailure(f"{self.rules.game} ended with the rewards {self.rewards!r} for seat {seat}")
        return float(number.value)  # type: ignore[arg-type]

    def ending(self, seat: int) -> str:
        """What ``seat`` reads when the game is over."""
        observations = getattr(base_game(self.game).state, "observations", {})
        last = self._messages(seat, observations.get(seat, ())) if isinstance(observations, Mapping) else ""
        told = self.info.get(seat) if isinstance(self.info, Mapping) else None
        reason = told.get("reason") if isinstance(told, Mapping) else None
        return "\n".join(part for part in (last, str(reason or "")) if part) or "The game is over."

    def _end(self) -> None:
        closed = self.game.close()
        self.rewards, self.info = closed if isinstance(closed, tuple) and len(closed) == 2 else (closed, {})

    def _messages(self, seat: int, seen: object) -> str:
        if isinstance(seen, str):
            return self._news(seat, seen)
        if seen is None:
            return ""
        roles = getattr(base_game(self.game).state, "role_mapping", None) or {}
        own = self._said.get(seat, "")
        parts = []
        for entry in seen:  # type: ignore[attr-defined]
            sender, message, kind = _parts(entry)
            if kind == "PLAYER_ACTION" and (
                sender == seat or (sender < 0 and message.strip(" []\n") == own.strip(" []\n"))
            ):
                continue  # its own words
            name = "" if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] "
            parts.append(f"{name}{message}".strip())
        return "\n".join(part for part in parts if part)

    def _news(self, seat: int, text: object) -> str:
        """What a view that repeats itself adds to what it showed last."""
        whole, before = str(text), self._shown.get(seat, "")
        self._shown[seat] = whole
        return (whole[len(before) :] if before and whole.startswith(before) else whole).strip()


def _parts(entry: Sequence[object]) -> tuple[int, str, str]:
    """Sender, text and kind of a message; some games give them in another order."""
    sender = next((part for part in entry if isinstance(part, int)), -1)
    text = next((part for part in entry if isinstance(part, str)), "")
    kind = next((part for part in entry if not isinstance(part, int | str)), None)
    return sender, text, str(getattr(kind, "name", ""))


def start_state(table: Table) -> object:
    """The state after ``reset`` as plain data."""
    state = base_game(table.game).state
    return {"read": table.read, "game": getattr(state, "game_state", None), "turn": table.seat}


Opponent = Callable[[str], str]
"""A seat's player: all that the seat has read so far -> its move"""
