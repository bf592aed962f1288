"""What an agent without a model does: calls with valid arguments drawn from a schema, and texts.

Uninformed, but not blind: numbers and words that the prompt or a parameter's description mentions are likelier than
others, since a guess of 7 says more about a game with numbers "from 1 to 16" than a guess of 48213.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from envgrad.environments.tools import ToolSpec

WORDS = ("a", "b", "yes", "no", "one", "cat", "red", "left", "hello", "test", "0", "1", "x")
MENTIONED = 0.75
"""how often a number or a word is taken from the texts, where they mention any"""
MAX_MENTIONED = 40
MAX_DEPTH = 4

_NUMBER = re.compile(r"(?<![\w.])-?\d{1,6}(?![\w.]\d)")
_WORD = re.compile(r"[^\W_][\w-]*")

Schema: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Say:
    """Write a text. Where there are tools it is an answer, which ends the episode; else ``step`` reads it."""

    text: str

    def __str__(self) -> str:
        return f"step({_short(self.text)})"


@dataclass(frozen=True, slots=True)
class Call:
    """Call a tool."""

    name: str
    arguments: Mapping[str, object]

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={_short(value)}" for key, value in self.arguments.items())
        return f"{self.name}({shown})"


Action: TypeAlias = Say | Call


@dataclass(frozen=True, slots=True)
class Hints:
    """Numbers and words that texts mention.

    Example:
        >>> hints = Hints.of("Guess a number from 1 to 16.")
        >>> hints.numbers, hints.words
        ((1, 16), ('Guess', 'a', 'number', 'from', '1', 'to', '16'))
    """

    numbers: tuple[int, ...] = ()
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, *texts: str) -> Hints:
        text = " ".join(texts)[:20_000]
        numbers = dict.fromkeys(int(found) for found in _NUMBER.findall(text))
        words = dict.fromkeys(_WORD.findall(text))
        return cls(tuple(numbers)[:MAX_MENTIONED], tuple(words)[:MAX_MENTIONED])

    def integer(self, rng: random.Random) -> int:
        """Between the least and the greatest number that is mentioned, or a small one."""
        if self.numbers and rng.random() < MENTIONED:
            return rng.randint(min(self.numbers), max(self.numbers))
        return rng.randint(-1, 10)

    def word(self, rng: random.Random) -> str:
        if self.words and rng.random() < MENTIONED:
            return rng.choice(self.words)
        return rng.choice(WORDS)


def random_call(tools: Sequence[ToolSpec], prompt: str, rng: random.Random) -> Call:
    """A call of one of ``tools`` (at least one) with valid arguments."""
    tool = rng.choice(tools)
    return Call(tool.name, random_arguments(tool, prompt, rng))


def random_arguments(tool: ToolSpec, prompt: str, rng: random.Random) -> dict[str, object]:
    """Arguments that fit the tool's schema; optional ones are given half the time.

    Example:
        >>> from envgrad.environments.tools import build_tool, check_arguments
        >>> def move(where: str, steps: int = 1) -> str: ...
        >>> move_tool = build_tool("move", move)
        >>> arguments = random_arguments(move_tool, "Go north.", random.Random(1))
        >>> check_arguments(move_tool, arguments) == arguments
        True
    """
    required = tool.parameters.get("required", ())
    arguments: dict[str, object] = {}
    for name, schema in tool.parameters["properties"].items():
        if name in required or rng.random() < 0.5:
            arguments[name] = random_value(schema, _hints(schema, prompt), rng)
    return arguments


def written_arguments(tool: ToolSpec, text: str, prompt: str, rng: random.Random) -> dict[str, object] | None:
    """Arguments with ``text`` for every free string; None if the tool takes no free string."""
    arguments: dict[str, object] = {}
    properties: Mapping[str, Schema] = tool.parameters["properties"]
    free = [name for name, schema in properties.items() if is_free_text(schema)]
    for name, schema in properties.items():
        if name in free:
            arguments[name] = text
        elif name in tool.parameters.get("required", ()):
            arguments[name] = random_value(schema, _hints(schema, prompt), rng)
    return arguments if free else None


def is_free_text(schema: Schema) -> bool:
    """Whether any string fits.

    Example:
        >>> is_free_text({"type": "string"}), is_free_text({"type": "string", "enum": ["a"]})
        (True, False)
    """
    if "enum" in schema:
        return False
    kind = schema.get("type", ())
    return "string" in ((kind,) if isinstance(kind, str) else kind)


def random_value(schema: Schema, hints: Hints, rng: random.Random, depth: int = 0) -> object:
    """A JSON value that fits ``schema``."""
    if schema.get("nullable") and rng.random() < 0.2:
        return None
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return random_value(rng.choice(schema["anyOf"]), hints, rng, depth)
    kinds = schema.get("type") or ["string", "integer", "boolean"]  # no type: anything fits
    kind = kinds if isinstance(kinds, str) else rng.choice(kinds)
    match kind:
        case "integer":
            return hints.integer(rng)
        case "number":
            return hints.integer(rng) + rng.choice((0, 0.5))
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            return _random_list(schema, hints, rng, depth)
        case "object":
            return _random_object(schema, hints, rng, depth)
        case _:
            return hints.word(rng)


def _random_list(schema: Schema, hints: Hints, rng: random.Random, depth: int) -> list[object]:
    if "prefixItems" in schema:
        return [random_value(item, hints, rng, depth + 1) for item in schema["prefixItems"]]
    length = 0 if depth >= MAX_DEPTH else rng.randint(0, 3)
    return [random_value(schema.get("items", {}), hints, rng, depth + 1) for _ in range(length)]


def _random_object(schema: Schema, hints: Hints, rng: random.Random, depth: int) -> dict[str, object]:
    wanted = schema.get("additionalProperties", {})
    wanted = wanted if isinstance(wanted, Mapping) else {}
    length = 0 if depth >= MAX_DEPTH else rng.randint(0, 2)
    return {hints.word(rng): random_value(wanted, hints, rng, depth + 1) for _ in range(length)}


def random_text(prompt: str, rng: random.Random) -> str:
    """One to four words, or a number."""
    hints = Hints.of(prompt)
    if rng.random() < 0.3:
        return str(hints.integer(rng))
    return " ".join(hints.word(rng) for _ in range(rng.randint(1, 4)))


def _hints(schema: Schema, prompt: str) -> Hints:
    """A parameter's own description says more than the prompt."""
    own = Hints.of(str(schema.get("description", "")))
    seen = Hints.of(prompt)
    return Hints(own.numbers or seen.numbers, (*own.words, *seen.words)[:MAX_MENTIONED])


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
