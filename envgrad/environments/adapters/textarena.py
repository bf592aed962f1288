"""TextArena's games as environments: the agent has one seat, and others are played by scripts, functions or itself.

::

    TextArenaEnvironment("TicTacToe-v0", opponents="random")   a factory: picklable, checked when it is made
        () -> TextArenaEpisode
                 reset(seed)     others move until it is the agent's turn -> what its seat has read
                 step(text)      the agent's move; others move            -> what its seat reads then, done
                 get_reward()    what the game paid the seat
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias

from envgrad.environments.adapters.textarena_games import GameRules, Opponent, Table, load_rules, start_state
from envgrad.environments.members import StepResult
from envgrad.environments.policy import forget_part, play_part, reward_part
from envgrad.environments.sources import hash63
from envgrad.errors import ConfigurationError, EnvironmentFailure
from envgrad.types import Message

SELF = "self"
RANDOM = "random"
MAX_OTHER_MOVES = 500
"""moves of the others in a row, after which a game is taken for endless"""
MAX_STARTS = 16
"""games that are over before the agent's first turn, one after another"""

Opponents: TypeAlias = str | Sequence[str] | Opponent | Mapping[int, Sequence[str] | Opponent | str]
_OPTION = re.compile(r"\[[^\[\]\n]{1,40}\]")


class TextArenaEnvironment:
    """A game of TextArena. Pass it as ``environment_factory``. Its moves are free text, as each game describes.

    Games draw from Python's and numpy's global generators; rollouts give each instance generators of its own, so the
    instances of one process run one at a time while they move (their sampling is concurrent all the same). Games with
    dictionaries need nltk's word lists on the machine; nothing is ever downloaded.

    Args:
        game: a registered id, e.g. ``"Wordle-v0"``.
        opponents: who plays the other seats, of all of them or by seat: ``"random"``: an option in square brackets out
            of what the seat read last, drawn from the game's generators; a list of moves, repeated from its first when
            they run out; a function of all that the seat has read (one string) -> its move, which keeps no state;
            ``"self"``: the policy that is trained, as it is at the moment; each seat of its own is a trained episode,
            compared with the same seat of the siblings. None: the game has one seat.
        seat: the agent's; ``"drawn"``: each group draws one, so that over many groups every seat is trained. It is the
            default where opponents are ``"self"``, else 0.
        players: None: the smallest number that the game takes.
        instructions: a system prompt, for all seats that the policy plays; None: none.
        move_tokens: tokens of one move of the policy in another seat; None: as long as the run's answers may be.
        unfinished_reward: of an episode that a limit of the run ended before the game was over. None: it cannot be
            scored, and is left out of training.
        determinism: ``"seeded"``; ``"fixed"`` for a game without chance.
        **options: for the game, in place of its registered ones.

    Raises:
        ConfigurationError: textarena is not installed; an unknown game, or one that cannot be made; an option that does
            not fit it.

    Example:
        >>> game = TextArenaEnvironment("TicTacToe-v0", opponents="self")              # doctest: +SKIP
        >>> GRPOTrainer("starter", args=config, environment_factory=game).train()      # doctest: +SKIP
    """

    def __init__(
        self,
        game: str,
        *,
        opponents: Opponents | None = None,
        seat: int | str | None = None,
        players: int | None = None,
        instructions: str | None = None,
        move_tokens: int | None = None,
        unfinished_reward: float | None = 0.0,
        determinism: str = "seeded",
        **options: object,
    ) -> None:
        if determinism not in ("fixed", "seeded", "none"):
            raise ConfigurationError(f"determinism={determinism!r} must be one of fixed, seeded, none")
        self.game = game
        self.options = options
        self._rules: GameRules | None = load_rules(game, players, options)
        self.players = self._rules.players
        self.instructions = instructions
        self.move_tokens = move_tokens
        self.unfinished_reward = None if unfinished_reward is None else float(unfinished_reward)
        self.determinism = determinism
        self.seat = _seat(game, seat, self.players, opponents)
        self.opponents = _by_seat(game, opponents, self.players, self.seat)
        self.self_play = any(player == SELF for player in self.opponents.values())
        if move_tokens is not None and not self.self_play:
            raise ConfigurationError(f"move_tokens={move_tokens} cannot act: the policy plays no other seat")

    @property
    def __name__(self) -> str:
        return "".join(part if part.isidentifier() else "_" for part in self.game.partition("-v")[0]) or "game"

    def __repr__(self) -> str:
        return f"TextArenaEnvironment({self.game!r})"

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_rules": None}

    def __call__(self) -> TextArenaEpisode:
        return SelfPlayEpisode(self) if self.self_play else ScriptedEpisode(self)

    def rules(self) -> GameRules:
        """The game, made once in a process."""
        if self._rules is None:
            self._rules = load_rules(self.game, self.players, self.options)
        return self._rules

    def seat_for(self, seed: int) -> int:
        """The agent's seat in a group."""
        return self.seat if isinstance(self.seat, int) else hash63("seat", seed) % self.players


def _seat(game: str, seat: int | str | None, players: int, opponents: object) -> int | str:
    if seat is None:
        return "drawn" if opponents == SELF and players > 1 else 0
    if seat == "drawn" and players > 1:
        return seat
    if isinstance(seat, bool) or not isinstance(seat, int) or not 0 <= seat < players:
        raise ConfigurationError(
            f"seat={seat!r} must be a seat of {game}, from 0 to {players - 1}" + (", or 'drawn'" * (players > 1))
        )
    return seat


def _by_seat(
    game: str, opponents: Opponents | None, players: int, seat: int | str
) -> dict[int, Sequence[str] | Opponent | str]:
    """A player for each seat that may be another's."""
    if players == 1:
        if opponents is not None:
            raise ConfigurationError(f"opponents={opponents!r} cannot act: {game} has one seat")
        return {}
    if opponents is None:
        raise ConfigurationError(
            f"{game} has {players} seats: say by opponents= who plays the others ('self', 'random', a list of moves, a "
            "function of what the seat has read, or these by seat)"
        )
    needed = [number for number in range(players) if number != seat]
    given = dict(opponents) if isinstance(opponents, Mapping) else dict.fromkeys(needed, opponents)
    if sorted(given) != needed:
        raise ConfigurationError(
            f"opponents has players for the seats {sorted(given)}; {game} needs them for {needed}, the agent's is "
            f"{seat}"
        )
    for number, player in given.items():
        moves = isinstance(player, Sequence) and len(player) > 0 and all(isinstance(move, str) for move in player)
        if player not in (SELF, RANDOM) if isinstance(player, str) else not (moves or callable(player)):
            raise ConfigurationError(
                f"the player {player!r} of seat {number} must be 'self', 'random', a list of moves, or a function of "
                "what the seat has read"
            )
    return given


class TextArenaEpisode:
    """A game in play, seen from the agent's seat."""

    def __init__(self, factory: TextArenaEnvironment) -> None:
        self._factory = factory
        self._table: Table | None = None
        self._moves: dict[int, int] = {}
        self._chats: dict[int, list[Message]] = {}
        self._cut = False
        self.determinism: str | None = factory.determinism
        self.seat = 0
        """the agent's"""

    @property
    def table(self) -> Table:
        """The game.

        Raises:
            EnvironmentFailure: before the first ``reset``.
        """
        if self._table is None:
            raise EnvironmentFailure("the game was not started: call reset first")
        return self._table

    def get_reward(self) -> float | None:
        """What the game paid the agent's seat."""
        return self._paid(self.seat)

    def start_state(self) -> object:
        """The seat, what was read and the game's hidden state."""
        return {"seat": self.seat, **dict(start_state(self.table))}  # type: ignore[call-overload]

    @property
    def done(self) -> bool:
        return self._table is not None and (self._table.over or self._cut)

    def _paid(self, seat: int) -> float | None:
        return self.table.reward(seat) if self.table.over else self._factory.unfinished_reward

    def _deal(self, seed: int) -> Generator[int, str | None, list[Message]]:
        """Start games until one lets the agent move; yields the seats whose moves are needed.

        A drawn seat is drawn again for each: where the other player loses at once, the agent soon has the first move.
        """
        for attempt in range(MAX_STARTS):
            own = hash63("textarena", seed, attempt)
            self._forget()
            self.seat = self._factory.seat_for(own)
            self._table = Table(rules=self._factory.rules(), seed=own)
            yield from self._others()
            if self._cut:
                raise EnvironmentFailure(
                    f"{self._factory.game}: the run's limits leave no room for the other seats' first moves: raise "
                    "max_completion_length"
                )
            if not self._table.over:
                system = self._factory.instructions
                opening: list[Message] = [{"role": "system", "content": system}] if system else []
                return [*opening, {"role": "user", "content": "\n".join(self._table.read[self.seat])}]
        raise EnvironmentFailure(
            f"{MAX_STARTS} games of {self._factory.game} in a row were over before seat {self.seat} had its first turn"
            + ("" if self._factory.seat == "drawn" else "; choose another seat, or seat='drawn'")
        )

    def _forget(self) -> None:
        self._moves, self._chats, self._cut = {}, {}, False

    def _reply(self, message: str) -> Generator[int, str | None, StepResult]:
        """The agent's move and the others'; yields the seats whose moves are needed."""
        table = self.table
        known = len(table.read[self.seat])
        table.move(message)
        yield from self._others()
        news = table.read[self.seat][known:]
        if table.over:
            news = [*news, table.ending(self.seat)]
        return StepResult("\n".join(news), done=self.done)

    def _others(self) -> Generator[int, str | None, None]:
        """Until it is the agent's turn, the game is over, or another seat of the policy's has no room for a move."""
        table = self.table
        for _ in range(MAX_OTHER_MOVES):
            if table.over or table.look() == self.seat:
                return
            move = yield table.seat
            if move is None:
                self._cut = True
                return
            table.move(move)
        raise EnvironmentFailure(
            f"{self._factory.game}: {MAX_OTHER_MOVES} moves in a row were not the agent's (seat {self.seat})"
        )

    def _scripted(self, seat: int) -> str:
        """The move of a seat that the policy does not play."""
        player = self._factory.opponents[seat]
        read = self.table.read[seat]
        if player == RANDOM:
            return _random_option(read)
        if isinstance(player, Sequence):
            number = self._moves[seat] = self._moves.get(seat, -1) + 1
            return player[number % len(player)]
        answer = player("\n".join(read))
        if not isinstance(answer, str):
            raise EnvironmentFailure(f"the player of seat {seat} answered {answer!r}: a move is a string")
        return answer


class ScriptedEpisode(TextArenaEpisode):
    """A game whose other seats answer at once."""

    def reset(self, seed: int) -> list[Message]:
        opening: list[Message] = self._play(self._deal(seed))
        return opening

    def step(self, message: str) -> StepResult:
        result: StepResult = self._play(self._reply(message))
        return result

    def _play(self, moves: Generator[int, str, Any]) -> Any:
        answer = None
        while True:
            try:
                seat = moves.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value
            answer = self._scripted(seat)


class SelfPlayEpisode(TextArenaEpisode):
    """A game in which the policy has other seats too, each with a chat and a reward of its own."""

    async def reset(self, seed: int) -> list[Message]:
        opening: list[Message] = await self._play(self._deal(seed))
        return opening

    async def step(self, message: str) -> StepResult:
        result: StepResult = await self._play(self._reply(message))
        return result

    def _forget(self) -> None:
        """What other seats said in a game that was over before the agent's first turn is not trained."""
        for seat in self._chats:
            forget_part(_part(seat))
        super()._forget()

    async def get_reward(self) -> float | None:  # type: ignore[override]
        for seat in self._chats:
            reward_part(_part(seat), self._paid(seat))
        return super().get_reward()

    async def _play(self, moves: Generator[int, str | None, Any]) -> Any:
        answer = None
        while True:
            try:
                seat = moves.send(answer)
            except StopIteration as end:
                return end.value
            own = self._factory.opponents.get(seat) == SELF
            answer = await self._asked(seat) if own else self._scripted(seat)

    async def _asked(self, seat: int) -> str | None:
        """The policy's move in another seat, whose chat goes on; None where it has no room left."""
        system = self._factory.instructions
        known = self._chats.get(seat, [{"role": "system", "content": system}] if system else [])
        read = self.table.read[seat]
        news = read[self._moves[seat] :] if seat in self._chats else read
        chat = [*known, {"role": "user", "content": "\n".join(news) or "Your move."}]
        answer = await play_part(_part(seat), chat, max_tokens=self._factory.move_tokens)
        if answer is None:
            return None
        self._moves[seat] = len(read)
        self._chats[seat] = [*chat, {"role": "assistant", "content": answer}]
        return answer


def _part(seat: int) -> str:
    return f"seat_{seat}"


def _random_option(read: Sequence[str]) -> str:
    """Something in square brackets that the seat read last: most games list moves so, or show one as an example.

    Example:
        >>> _random_option(["Write [number].", "Moves: [3]"])
        '[3]'
    """
    for text in reversed(read):
        options: list[str] = sorted(set(_OPTION.findall(text)))
        if options:
            return random.choice(options)
    return "[0]"
