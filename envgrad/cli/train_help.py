"""``envgrad train --help``: every option with its default, read off the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from envgrad.cli.field_words import IMPLIED, TRANSFORMERS_HELP, UNUSED
from envgrad.cli.flags import ConfigField, read_fields

WIDE = 100
"""columns from which on three of them are readable"""


def show_train_help(front: str, console: Console | None = None) -> None:
    """Print the command's own help, then a table of the configuration's options."""
    from envgrad.config import REFUSED, TRL_REFUSED, GRPOConfig

    out = console or Console()
    if front:
        out.print(Text(front))
    cannot_act = REFUSED | TRL_REFUSED | IMPLIED | UNUSED
    shown = [field for field in read_fields(GRPOConfig).values() if field.name not in cannot_act]
    ours = [field for field in shown if field.owner != "TrainingArguments" and field.help]
    rest = [field for field in shown if field not in ours]
    listed = _table if out.width >= WIDE else _list
    out.print(listed("Options of envgrad", ours))
    out.print(listed("Options of transformers.TrainingArguments", rest))
    out.print(
        Text(
            "Names may be written with - or _. Switches: --flag, --no-flag, --flag true. Lists: --flag a b. "
            "Mappings: --flag '{\"key\": 1}'."
        )
    )


def _list(title: str, fields: Sequence[ConfigField]) -> Group:
    """For narrow terminals: what an option means stands below it."""
    parts: list[RenderableType] = [Text(title, style="bold")]
    for field in fields:
        default = _default(field.default)
        parts.append(Text.assemble((field.flag, "cyan"), (f"  {default}" if default else "", "dim")))
        parts.append(Padding(Text(_meaning(field)), (0, 0, 0, 4)))
    return Group(*parts)


def _meaning(field: ConfigField) -> str:
    return TRANSFORMERS_HELP.get(field.name) or field.help or f"A field of transformers; it {field.rule}."


def _table(title: str, fields: Sequence[ConfigField]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("option", no_wrap=True)
    table.add_column("default", overflow="fold", max_width=16)
    table.add_column("meaning", overflow="fold")
    for field in fields:
        default = Text(_default(field.default), style="dim")
        table.add_row(Text(field.flag, style="cyan"), default, Text(_meaning(field)))
    return table


def _default(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return "" if value is None else str(value)
