from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from envgrad.cli.transcript import headline, message_lines, transcript
from envgrad.types import Episode, Message, StopReason, Task


def episode(messages: list[Message], environment: str = "grid") -> Episode:
    return Episode(
        task=Task(position=7, split="train", environment=environment, group_id=1, seed=2), sibling=3,
        token_ids=(1, 2, 3), mask=(0, 1, 1), logprobs=(0.0, -1.0, -1.0), versions=(-1, 0, 0), prompt_length=1,
        messages=tuple(messages), turns=(), stop_reason=StopReason.DONE, reward=1.0,
    )  # fmt: skip


def shown(messages: list[Message], **options: Any) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(transcript(episode(messages), **options))
    return captured.get()


def call(arguments: object, name: str = "move") -> Message:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def test_messages_read_as_a_conversation() -> None:
    text = shown(
        [
            {"role": "user", "content": [{"type": "text", "text": "Go."}]},
            {"role": "assistant", "content": "I go.", "reasoning_content": "Where?", **call({"to": "north", "n": 2})}
            | {"content": "I go."},
            {"role": "tool", "content": "east\nnorth"},
        ]
    )
    assert [line.rstrip() for line in text.splitlines()] == [
        "user       Go.",
        "assistant  (Where?)",
        "           I go.",
        '           -> move(to="north", n=2)',
        "tool       east / north",
    ]


def test_calls_of_any_shape_are_shown() -> None:
    assert [line.text for line in message_lines(call('{"a": 1}'))] == ['-> move({"a": 1})']
    assert [line.text for line in message_lines(call(None))] == ["-> move()"]
    assert [line.text for line in message_lines({"role": "assistant", "content": None})] == [""]
    odd = {"role": "assistant", "content": "", "tool_calls": ["nonsense"]}
    assert [line.text for line in message_lines(odd)] == ["-> None()"]


def test_hostile_text_stays_text() -> None:
    hostile = "[/][red]x[/red] \x1b[31m\x1b]0;t\x07 [link=http://x]"
    text = shown([{"role": "user", "content": hostile}, call({"to": hostile}, name="[bold]\x1b[2J")])
    assert "[/][red]x[/red]  [link=http://x]" in text
    assert "[bold](to=" in text
    assert "\x1b" not in text
    assert "\x1b" not in headline(episode([], environment="\x1b[2Jgrid"))


def test_long_episodes_are_cut_in_the_middle_and_say_so() -> None:
    messages: list[Message] = [{"role": "user", "content": f"message {index}"} for index in range(50)]
    lines = [line.rstrip() for line in shown(messages, max_lines=6).splitlines()]
    assert lines[:2] == ["user  message 0", "      message 1"]
    assert lines[2].strip() == "... 44 more ..."
    assert lines[-1].endswith("message 49")
    assert len(lines) == 7
    assert "(+400 characters)" in shown([{"role": "user", "content": "y" * 500}], max_characters=100)


def test_headline_names_the_task_and_the_end() -> None:
    assert headline(episode([])) == "grid train/7 sibling 3: reward 1.00, ended by done, 0 turns, 2 tokens"
