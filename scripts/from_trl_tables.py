"""Write the tables of ``docs/from_trl.md`` from the tables in the code.

python scripts/from_trl_tables.py          # rewrites the page
python scripts/from_trl_tables.py --check  # exit code 1 if it is not up to date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path

from transformers import TrainingArguments

from envgrad.config import REFUSED, AsyncGRPOConfig, GRPOConfig, RLOOConfig, SDPOConfig
from envgrad.config.trl_fields import TRL_DEFAULTS, trl_field, trl_fields

PAGE = Path(__file__).parents[1] / "docs" / "from_trl.md"
CONFIGS = {
    "GRPOConfig": GRPOConfig,
    "RLOOConfig": RLOOConfig,
    "SDPOConfig": SDPOConfig,
    "AsyncGRPOConfig": AsyncGRPOConfig,
}


def tables() -> dict[str, str]:
    """Every generated part of the page, by its name in the page's marks."""
    return {"fields": field_table(), "defaults": default_table(), "refused": refused_table(), "ours": own_table()}


def field_table() -> str:
    rows = []
    for entry in trl_fields():
        classes = [name.removesuffix("Config") for name, defaults in TRL_DEFAULTS.items() if entry.name in defaults]
        here = f"{entry.status}: `{entry.instead}`" if entry.status == "renamed" else entry.status
        why = f"{_sentence(entry.instead)}" if entry.status == "not supported" else ""
        rows.append((f"`{entry.name}`", ", ".join(classes), here, " ".join(part for part in (why, entry.note) if part)))
    return _markdown(("field", "config", "here", "note"), rows)


def default_table() -> str:
    """Fields that mean the same and start from another value."""
    rows = []
    for name, config in CONFIGS.items():
        own = {f.name: _default(f) for f in fields(config)}
        for field, theirs in sorted(TRL_DEFAULTS[name].items()):
            if trl_field(field).status == "same" and own[field] != theirs:
                rows.append((f"`{name}.{field}`", f"`{theirs!r}`", f"`{own[field]!r}`"))
    return _markdown(("field", "trl", "envgrad"), rows)


def refused_table() -> str:
    return _markdown(
        ("field of TrainingArguments", "why, and what to do"),
        [(f"`{name}`", _sentence(reason)) for name, reason in sorted(REFUSED.items())],
    )


def own_table() -> str:
    """Fields that trl does not have."""
    known = {f.name for f in fields(TrainingArguments)}.union(*TRL_DEFAULTS.values())
    found: dict[str, str] = {}
    for config in CONFIGS.values():
        found |= {f.name: str(f.metadata.get("help", "")) for f in fields(config) if f.name not in known}
    return _markdown(("field", "meaning"), [(f"`{name}`", text) for name, text in sorted(found.items())])


def _default(field: Field[object]) -> object:
    return field.default if field.default is not MISSING else None


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def with_tables(page: str) -> str:
    """``page`` with its generated parts made anew."""
    for name, table in tables().items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
        page, count = mark.subn(lambda found, table=table: f"{found[1]}\n{table}\n{found[2]}", page)
        if count != 1:
            raise SystemExit(f"{PAGE.name} must have the marks of the part {name!r} once, found {count}")
    return page


def main() -> None:
    old = PAGE.read_text(encoding="utf-8")
    new = with_tables(old)
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if new == old else f"{PAGE} is not up to date: run python scripts/from_trl_tables.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
