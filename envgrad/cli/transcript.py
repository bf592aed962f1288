"""An episode as a person reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from envgrad.cli.text import figure, printable, shorten
from envgrad.types import Episode, Message

STYLES = {"system": "magenta", "user": "bright_blue", "assistant": "green", "tool": "yellow"}
_HEAD = 2
"""messages shown from the beginning where the middle is left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One part of a message: who speaks, and what."""

    role: str
    text: str


def message_lines(message: Message) -> Iterator[Line]:
    """The parts of one message: thoughts, text, tool calls.

    Example:
        >>> call = {"type": "function", "function": {"name": "move", "arguments": {"direction": "north"}}}
        >>> [line.text for line in message_lines({"role": "assistant", "content": "", "tool_calls": [call]})]
        ['-> move(direction="north")']
    """
    role = printable(str(message.get("role", "")))
    for key in ("reasoning_content", "thinking"):
        if message.get(key):
            yield Line(role=role, text=f"({printable(str(message[key])).strip()})")
    text = printable(_content(message.get("content"))).strip()
    calls = [f"-> {printable(_call(call))}" for call in message.get("tool_calls") or ()]
    if text or not calls:
        yield Line(role=role, text=text)
    for call in calls:
        yield Line(role=role, text=call)


def _content(content: object) -> str:
    """Text of a message's content: a string, None, or content blocks."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(
            str(block.get("text", f"[{block.get('type', 'block')}]")) if isinstance(block, Mapping) else str(block)
            for block in content
        )
    return str(content)


def _call(call: object) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping):
        return str(call)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        words = [f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in arguments.items()]
        return f"{function.get('name')}({', '.join(words)})"
    return f"{function.get('name')}({'' if arguments is None else arguments})"


def headline(episode: Episode) -> str:
    """Reward, end and length of an episode in one line."""
    reward = "no reward" if episode.reward is None else f"reward {figure(episode.reward)}"
    return (
        f"{printable(episode.task.environment)} {episode.task.key} sibling {episode.sibling}: {reward}, "
        f"ended by {episode.stop_reason}, {len(episode.turns)} turns, {episode.completion_length} tokens"
    )


def transcript(episode: Episode, *, max_lines: int = 12, max_characters: int = 240) -> Table:
    """The episode's messages, each part shortened, the middle left out beyond ``max_lines``.

    What models and environments wrote is shown as it is, never read as markup.
    """
    lines = [line for message in episode.messages for line in message_lines(message)]
    skipped = len(lines) - max_lines
    if skipped > 0:
        tail = max_lines - _HEAD
        lines = [*lines[:_HEAD], Line(role="", text=f"... {skipped} more ..."), *lines[len(lines) - tail :]]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    before = None
    for line in lines:
        label = Text(line.role if line.role != before else "", style=STYLES.get(line.role, "dim"))
        grid.add_row(label, Text(shorten(line.text, max_characters).replace("\n", " / ")))
        before = line.role
    return grid
