"""What ``envgrad play`` shows beside the chat: the tools, help, and how the episode ended."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from envgrad.cli.text import figure, printable
from envgrad.environments.arguments import describe
from envgrad.environments.tools import ToolSpec
from envgrad.types import Episode, FailedEpisode, StopReason

_ENDS = {
    StopReason.DONE: "the environment ended it",
    StopReason.ANSWER: "an answer without a tool call",
    StopReason.MAX_TURNS: "--max-turns is reached; the last turn's calls are not made",
    StopReason.TOOL_TIMEOUT: "a call took longer than --timeout, and cannot be stopped",
}


def show_opening(console: Console, tools: Sequence[ToolSpec], *, steps: bool) -> None:
    """The tools, and what to do."""
    if tools:
        console.print(Text("tools", style="dim"))
        for tool in tools:
            show_tool(console, tool)
        said = "Type a call. Any other text is an answer, which ends the episode."
    elif steps:
        said = "Type an answer: it goes to the environment, which may go on."
    else:
        said = "There are no tools: type an answer, which ends the episode."
    console.print(Text(f"{said} ? shows help, q leaves.", style="dim italic"))


def show_tool(console: Console, tool: ToolSpec) -> None:
    """Signature, description and arguments, as the model's template gets them."""
    function = tool.schema["function"]
    lines = [Text(printable(tool.signature), style="cyan")]
    if function.get("description"):
        lines.append(Text(printable(str(function["description"]))))
    for name, schema in tool.parameters["properties"].items():
        about = printable(str(schema.get("description") or ""))
        if about:
            lines.append(Text.assemble((printable(name), "cyan"), f": {about}"))
    for number, line in enumerate(lines):
        console.print(Padding(line, (0, 0, 0, 4 if number else 2), expand=False))


def show_help(console: Console, tools: Sequence[ToolSpec], name: str, *, can_call: bool) -> None:
    """How to answer; of one tool only, if ``name`` is one's."""
    named = [tool for tool in tools if tool.name == name]
    for tool in named or tools:
        show_tool(console, tool)
    rows = [("q", "leave"), ("?", "this help"), ("line \\", "goes on in the next line")]
    if can_call:
        rows = [("= text", "answer with this text, whatever it looks like"), *rows]
        rows = [*_call_rows((named or list(tools))[0]), *rows]
    else:
        rows = [("text", "answer"), ("= text", "answer with this text, even q or ?"), *rows]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold")
    grid.add_column(overflow="fold")
    for form, meaning in rows:
        grid.add_row(Text(printable(form)), Text(meaning))
    console.print(grid)


def _call_rows(tool: ToolSpec) -> list[tuple[str, str]]:
    """The ways to call a tool, with its own names."""
    properties = tool.parameters["properties"]
    shown = [(name, describe(schema)) for name, schema in properties.items()]
    if not shown:
        return [(tool.name, "call it"), (f'{{"name": "{tool.name}"}}', "the same, as a model writes it")]
    words = " ".join(f"{name}=..." for name, _ in shown)
    written = ", ".join(f'"{name}": ...' for name, _ in shown)
    return [
        (tool.name, "asks for each argument"),
        (f"{tool.name} {words}", "call it"),
        (f'{{"name": "{tool.name}", "arguments": {{{written}}}}}', "as a model writes it: made as it is, fit or not"),
    ]


def show_end(console: Console, episode: Episode) -> None:
    """The reward by component, why the episode ended, and its length."""
    reward = episode.reward
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("reward", Text("none: it cannot be scored" if reward is None else figure(reward), style="bold"))
    if list(episode.rewards.values()) != [reward]:
        for name, value in episode.rewards.items():
            label = "paid in its turns" if name == "turns" else printable(name)
            grid.add_row("", Text(f"{'none' if value is None else figure(value)}  {label}"))
    for part in episode.parts:
        grid.add_row(f"part {printable(part.part)}", "no reward" if part.reward is None else figure(part.reward))
    why = _ENDS.get(episode.stop_reason)
    grid.add_row("ended by", Text(f"{episode.stop_reason}{f': {why}' if why else ''}"))
    grid.add_row("turns", str(len(episode.turns)))
    if episode.feedback is not None:
        grid.add_row("feedback", Text(printable(episode.feedback)))
    console.print()
    console.print(grid)


def show_failure(console: Console, failure: FailedEpisode) -> None:
    """What went wrong in the environment."""
    said = printable(" ".join(str(failure.error).split()))
    console.print(Text.assemble(("the episode failed ", "bold red"), f"({failure.kind}): {said}"), soft_wrap=True)
