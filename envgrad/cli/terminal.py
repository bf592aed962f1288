"""The terminal that an episode is played in: what it shows, and how a line becomes an answer.

It works as well where the input is a file or a pipe; then the lines read are shown too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envgrad.cli.play_display import show_help
from envgrad.cli.text import printable
from envgrad.cli.transcript import STYLES, message_lines
from envgrad.cli.typed import Answer, Form, NotUnderstood, call_of, read_line, read_value
from envgrad.environments.arguments import describe, fit
from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvgradError
from envgrad.types import Message

PROMPT = "> "
MORE = ". "


class LeftGame(EnvgradError):
    """The person left before the episode's end."""

    def __init__(self, *, input_ended: bool) -> None:
        super().__init__("left")
        self.input_ended = input_ended
        """a file or pipe had no further line"""


@dataclass(slots=True)
class Terminal:
    """Shows an episode's messages, and reads answers."""

    console: Console
    stream: IO[str]
    """the standard output as it was: what an environment prints goes elsewhere"""

    def title(self, text: str) -> None:
        self.console.print(Text(printable(text), style="bold"))

    def note(self, text: str) -> None:
        """A word of the program itself."""
        self.console.print(Text(printable(text), style="dim italic"))

    def messages(self, messages: Iterable[Message]) -> None:
        """Messages whole, as the agent reads them; nothing in them is markup."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for message in messages:
            for line in message_lines(message):
                name = printable(str(message.get("name") or ""))
                label = f"{line.role} {name}" if name else line.role
                grid.add_row(Text(label, style=STYLES.get(line.role, "dim")), Text(line.text or "(empty)"))
        if grid.row_count:
            self.console.print(grid)

    def read(self, tools: Sequence[ToolSpec], *, can_call: bool) -> Answer:
        """The next answer; ``?`` shows help before it.

        Raises:
            LeftGame: by ``q``, or because the input ended.
        """
        complete_names([tool.name for tool in tools])
        while True:
            line = self._whole_line()
            if line in ("q", "quit"):
                raise LeftGame(input_ended=False)
            if line.startswith("?"):
                show_help(self.console, tools, line.removeprefix("?").strip(), can_call=can_call)
                continue
            if not line:
                self.note("An answer has at least a word; ? shows help, q leaves.")
                continue
            try:
                answer = read_line(line, tools if can_call else ())
                if isinstance(answer, Form):
                    answer = Answer(calls=(call_of(answer.tool, self._fill(answer.tool)),))
            except NotUnderstood as error:
                self.note(str(error))
                continue
            if answer.calls:
                self.messages([answer.message()])
            return answer

    def _whole_line(self) -> str:
        """A line, and those that it goes on in: a backslash at its end says so."""
        lines = [self._line(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(MORE))
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        if sys.stdin.isatty():
            try:
                with redirect_stdout(self.stream):  # else there would be no line editing
                    return input(prompt)
            except EOFError:
                raise LeftGame(input_ended=False) from None
        line = sys.stdin.readline()
        if not line:
            raise LeftGame(input_ended=True)
        self.console.print(Text(f"{prompt}{printable(line.rstrip())}", style="bold"), soft_wrap=True)
        return line.rstrip("\n")

    def _fill(self, tool: ToolSpec) -> dict[str, Any]:
        """Ask for each argument of a tool."""
        required = tool.parameters.get("required", ())
        arguments: dict[str, Any] = {}
        for name, schema in tool.parameters["properties"].items():
            if (given := self._ask(name, schema, optional=name not in required)) is not None:
                arguments[name] = given[0]
        return arguments

    def _ask(self, name: str, schema: Mapping[str, Any], *, optional: bool) -> tuple[Any] | None:
        """A value that fits, or None where it is left out."""
        rule = f"{describe(schema)}{'; empty leaves it out' if optional else ''}"
        about = str(schema.get("description") or "")
        self.note(f"  {name}: {rule}{f'. {about}' if about else ''}")
        while True:
            line = self._line(f"  {name} = ").strip()
            if not line and optional:
                return None
            value = read_value(line, schema)
            problem = fit(value, schema, name)[1] if line else f"{name} is required"
            if problem is None:
                return (value,)
            self.note(problem)


def complete_names(names: Sequence[str]) -> None:
    """Let the tab key complete these, where this Python can edit lines."""
    with contextlib.suppress(ImportError):
        import readline

        def complete(text: str, state: int) -> str | None:
            found = [name for name in names if name.startswith(text)]
            return found[state] if state < len(found) else None

        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
