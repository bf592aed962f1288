"""``envgrad train --help``: every option with its default, read off the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envgrad.cli.flags import ConfigField, read_fields

UNUSED = {
    "do_train": "envgrad train always trains; remove it",
    "do_predict": "there is nothing to predict; --do-eval evaluates after training",
}
"""fields that only scripts of transformers read, with the reason and the fix"""


def show_train_help(front: str, console: Console | None = None) -> None:
    """Print the command's own help, then a table of the configuration's options."""
    from envgrad.config import REFUSED, TRL_REFUSED, GRPOConfig

    out = console or Console()
    if front:
        out.print(Text(front))
    shown = [field for field in read_fields(GRPOConfig).values() if field.name not in REFUSED | TRL_REFUSED | UNUSED]
    ours = [field for field in shown if field.owner != "TrainingArguments" and field.help]
    rest = [field for field in shown if field not in ours]
    out.print(_table("Options of envgrad", ours))
    out.print(_table("Options of transformers.TrainingArguments", rest))
    out.print(
        Text(
            "Names may be written with - or _. Switches: --flag, --no-flag, --flag true. Lists: --flag a b. "
            "Mappings: --flag '{\"key\": 1}'."
        )
    )


def _table(title: str, fields: Sequence[ConfigField]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("option", no_wrap=True)
    table.add_column("default", overflow="fold", max_width=16)
    table.add_column("meaning", overflow="fold")
    for field in fields:
        meaning = field.help or f"A {field.owner} field; it {field.rule}."
        table.add_row(Text(field.flag, style="cyan"), Text(_default(field.default), style="dim"), Text(meaning))
    return table


def _default(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return "" if value is None else str(value)
