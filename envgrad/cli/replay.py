"""``envgrad replay``: a recorded episode is played again, and the first difference is shown."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envgrad.cli.locate import locate
from envgrad.cli.text import printable, shorten
from envgrad.episodes.reader import EpisodeReader
from envgrad.episodes.replay import Replay, replay_episode
from envgrad.errors import ConfigurationError

_MAX_SHOWN = 1200


def run_replay(run: Path, episode: str, *, factory: str | None) -> None:
    """Play the episode again; what its environment prints goes to stderr.

    Raises:
        ConfigurationError: there is no such episode, or it cannot be played again.
        typer.Exit: code 1 if the environment did something else.
    """
    with EpisodeReader(run) as reader:
        number = find_number(reader, episode)
        made = None if factory is None else locate(factory)
        with redirect_stdout(sys.stderr):
            replay = replay_episode(reader, number, factory=made)
    show_replay(Console(), replay)
    if not replay.equal:
        raise typer.Exit(1)


def find_number(reader: EpisodeReader, episode: str) -> int:
    """The number that ``12``, or ``train/3/0`` (split, task, sibling: the latest one), means.

    Raises:
        ConfigurationError: neither form, or there is no such episode.
    """
    if episode.isdecimal():
        return reader.summary(int(episode)).number
    words = episode.split("/")
    if len(words) != 3 or not (words[1].isdecimal() and words[2].isdecimal()):
        raise ConfigurationError(
            f"EPISODE {episode!r} is neither a number, as `envgrad view` shows it, nor split/task/sibling, which is "
            "written train/3/0"
        )
    found = reader.find(words[0], int(words[1]), int(words[2]))
    if found is None:
        raise ConfigurationError(f"{reader.folder} holds no episode {episode}; its splits are {reader.splits()}")
    return found.number


def show_replay(console: Console, replay: Replay) -> None:
    """The verdict, and both sides of the first difference."""
    summary = replay.record.summary
    where = f"{summary.split}/{summary.position}/{summary.sibling}"
    name = printable(f"episode {summary.number} ({where}{f' of {summary.environment}' if summary.environment else ''})")
    turns = f"{summary.turns} {'turn' if summary.turns == 1 else 'turns'}"
    if replay.difference is None:
        console.print(Text.assemble((f"{name}: ", "bold"), ("equal", "bold green"), f", {turns} played again"))
    else:
        difference = replay.difference
        console.print(Text.assemble((f"{name}: ", "bold"), ("different", "bold red"), f" at {difference.where}"))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("recorded", Text(shorten(printable(difference.recorded), _MAX_SHOWN)))
        table.add_row("replayed", Text(shorten(printable(difference.replayed), _MAX_SHOWN)))
        console.print(table)
    if replay.not_repeated:
        names = printable(", ".join(replay.not_repeated))
        console.print(Text(f"not repeated, because the environment alone does not give it: {names}", style="dim"))
