"""Random, reply-blind play as chats: what the starter learns from.

Every action is drawn before the reply to the one before it is known, uniformly over what the tool takes. So the chats
teach how a call is written and which tool belongs to which schema, and nothing about what to do. Besides the example
environments there are made-up tools with random names, parameters and replies, and chats without tools.
"""

from __future__ import annotations

import importlib
import random
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast

from envgrad.environments.tools import ToolSpec, build_tool, check_arguments, unknown_tool
from envgrad.errors import ConfigurationError, ToolCallError
from envgrad.starter.compass import STEPS, Compass
from envgrad.types import Message

Schema: TypeAlias = dict[str, object]
Arguments: TypeAlias = dict[str, object]
Draw: TypeAlias = Callable[[random.Random], Arguments]


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "search read write open close send list find get set add remove start stop check look take drop use push pull turn "
    "press pick choose answer submit buy sell pay count measure copy paste save load run test build paint draw play "
    "guess move wait ask tell show hide lock fetch"
)
PARAMETERS = _words(
    "name text item place time color size amount count number word key value path file query choice side direction "
    "speed title city day month price page line row column target source message level index code letter move"
)
VALUES = _words(
    "red green blue black white small large left right up down near far north east south west front back low high "
    "apple bread water door box table lamp book stone gold one two three four yes no hot cold open closed alpha beta "
    "gamma delta first last none all"
)
PROSE = _words(
    "please the a you can now with for then this task goal room find use tool your next step at is in to of it "
    "error done nothing happened ok what not reach answer result question"
)
REFUSED = 0.06
"""share of replies that are errors"""
SQUARES = [file + rank for file in "abcdefgh" for rank in "12345678"]


class PlainEnvironment(Protocol):
    """What the transcripts need of an example environment."""

    @property
    def done(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One transcript: the messages and the schemas of the tools that they call."""

    messages: list[Message]
    tools: list[Schema]


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """An example environment and how to play it blindly."""

    factory: Callable[[], object]
    make: Callable[[random.Random], tuple[PlainEnvironment, str]]
    """a fresh environment after its reset, and its opening"""
    tool: str
    draw: Draw
    """arguments for the tool, uniform over what it takes"""


def load_games(examples: Path) -> dict[str, Game]:
    """The bundled environments by name; those that are example pages are imported from the folder ``examples``.

    Raises:
        ConfigurationError: ``examples`` does not hold the pages.
    """
    with _importable(examples):
        guess_number, wordle = (importlib.import_module(name) for name in ("guess_number", "wordle"))

    def compass(rng: random.Random) -> tuple[PlainEnvironment, str]:
        env = Compass()
        return env, env.reset(seed=rng.getrandbits(62))

    def number(rng: random.Random) -> tuple[PlainEnvironment, str]:
        env = guess_number.GuessNumber()
        return env, env.reset(seed=rng.getrandbits(62))

    def word(rng: random.Random) -> tuple[PlainEnvironment, str]:
        env = wordle.Wordle(seed=rng.getrandbits(62))
        return env, env.reset()

    return {
        "compass": Game(
            factory=Compass, make=compass, tool="move", draw=lambda rng: {"direction": rng.choice(list(STEPS))}
        ),
        "guess_number": Game(
            factory=guess_number.GuessNumber, make=number, tool="guess", draw=lambda rng: {"number": rng.randint(1, 16)}
        ),
        "wordle": Game(
            factory=wordle.Wordle, make=word, tool="guess", draw=lambda rng: {"word": rng.choice(wordle.WORDS)}
        ),
    }


@contextmanager
def _importable(examples: Path) -> Iterator[None]:
    if not (examples / "guess_number.py").is_file():
        raise ConfigurationError(
            f"{examples} does not hold the example environments (guess_number.py, wordle.py): "
            "give the folder examples/ of a checkout of the repository with --examples"
        )
    sys.path.insert(0, str(examples))
    try:
        yield
    finally:
        sys.path.remove(str(examples))


def draw_chat(rng: random.Random, games: dict[str, Game]) -> Chat:
    """One transcript of a kind drawn at random."""
    kind = rng.choices(
        ("compass", "guess_number", "wordle", "board", "made up", "text"), weights=(20, 15, 15, 10, 35, 5)
    )[0]
    if kind in games:
        return play_blindly(rng, games[kind])
    return {"board": _board_chat, "made up": _made_up_chat, "text": _text_chat}[kind](rng)


def play_blindly(rng: random.Random, game: Game) -> Chat:
    """Play ``game`` to its end with random actions."""
    env, opening = game.make(rng)
    tool = cast("Callable[..., str]", getattr(env, game.tool))
    spec = build_tool(game.tool, tool)
    messages: list[Message] = [{"role": "user", "content": opening}]
    while not env.done:
        arguments = game.draw(rng)
        messages.append(_call(game.tool, arguments))
        # Now and then an error, so that one malformed call of the sampled model does not lead to the next.
        refused = rng.random() < REFUSED
        messages.append({"role": "tool", "content": _refusal(rng, spec) if refused else tool(**arguments)})
    return Chat(messages=messages, tools=[spec.schema])


def _refusal(rng: random.Random, spec: ToolSpec) -> str:
    """What a model is told whose call cannot be read or does not fit its tool."""
    name = rng.choice(NAMES)
    parameter = rng.choice([parameter for parameter in PARAMETERS if parameter not in spec.parameters["properties"]])
    kind = rng.randrange(3)
    if kind == 0:
        return unknown_tool(name, [spec])
    if kind == 1:
        text = f'{{"name": "{name}", "arguments": {{"{parameter}'
        return f"malformed tool call: Unterminated string starting at character {len(text)}, in: {text}"
    try:
        check_arguments(spec, {parameter: rng.choice(VALUES)})
    except ToolCallError as error:
        return str(error)
    raise AssertionError(f"{spec.name} must refuse the argument {parameter}, which it does not take")


def _board_chat(rng: random.Random) -> Chat:
    """A board game in which moves go from square to square, such as chess."""
    pieces = " ".join(rng.choice("KQRBNPkqrbnp") + square for square in rng.sample(SQUARES, rng.randint(3, 6)))
    messages: list[Message] = [{"role": "user", "content": f"White (capitals) mates in one: {pieces}"}]
    for _ in range(rng.randint(1, 3)):
        messages.append(_call("play", {"move": "".join(rng.sample(SQUARES, 2))}))
        messages.append({"role": "tool", "content": rng.choice(("not legal", "no mate"))})
    return Chat(messages=messages, tools=[_schema("play", {"move": {"type": "string"}}, ["move"])])


def _made_up_chat(rng: random.Random) -> Chat:
    drawn = [_made_up_tool(rng, name) for name in rng.sample(NAMES, rng.choice((1, 1, 2, 3)))]
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": _prose(rng)})
    messages.append({"role": "user", "content": _prose(rng)})
    for _ in range(rng.randint(1, 3)):
        name, _, draw = rng.choice(drawn)
        messages.append(_call(name, draw(rng)))
        messages.append({"role": "tool", "content": _prose(rng)})
    return Chat(messages=messages, tools=[schema for _, schema, _ in drawn])


def _text_chat(rng: random.Random) -> Chat:
    messages: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": _prose(rng)})
        answer = str(rng.randint(1, 16)) if rng.random() < 0.5 else rng.choice(VALUES)
        messages.append({"role": "assistant", "content": answer})
    return Chat(messages=messages, tools=[])


def _made_up_tool(rng: random.Random, name: str) -> tuple[str, Schema, Draw]:
    properties: dict[str, Schema] = {}
    draws: dict[str, Callable[[random.Random], object]] = {}
    for parameter in rng.sample(PARAMETERS, rng.choice((1, 1, 1, 2, 2, 3))):
        properties[parameter], draws[parameter] = _made_up_parameter(rng)
    required = [parameter for parameter in properties if rng.random() < 0.9]

    def draw(rng: random.Random) -> Arguments:
        return {key: value(rng) for key, value in draws.items() if key in required or rng.random() < 0.5}

    return name, _schema(name, properties, required), draw


def _made_up_parameter(rng: random.Random) -> tuple[Schema, Callable[[random.Random], object]]:
    kind = rng.choice(("enum", "enum", "enum", "enum", "integer", "string", "boolean", "number"))
    if kind == "enum":
        choices = rng.sample(rng.choice((VALUES, list(STEPS))), rng.randint(2, 4))
        return {"type": "string", "enum": choices}, lambda rng: rng.choice(choices)
    draws: dict[str, Callable[[random.Random], object]] = {
        "integer": lambda rng: rng.randint(0, 20),
        "string": lambda rng: (
            "".join(rng.choices(string.ascii_lowercase, k=3)) if rng.random() < 0.3 else rng.choice(VALUES)
        ),
        "boolean": lambda rng: rng.random() < 0.5,
        "number": lambda rng: round(rng.uniform(0, 10), 1),
    }
    return {"type": kind}, draws[kind]


def _schema(name: str, properties: dict[str, Schema], required: Sequence[str]) -> Schema:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _call(name: str, arguments: Arguments) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _prose(rng: random.Random) -> str:
    words = [rng.choice(PROSE) for _ in range(rng.randint(1, 6))]
    if rng.random() < 0.3:
        words.append(str(rng.randint(0, 20)))
    return " ".join(words) + rng.choice(("", ".", ":", "?"))
