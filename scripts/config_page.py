"""Write ``docs/config.md``, every field of the configurations, from the code.

python scripts/config_page.py          # rewrites the page
python scripts/config_page.py --check  # exit code 1 if it is not up to date
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

import transformers
from transformers import TrainingArguments

from envgrad.cli.field_words import IMPLIED, TRANSFORMERS_HELP, UNUSED
from envgrad.cli.flags import ConfigField, read_fields
from envgrad.config import REFUSED, AsyncGRPOConfig, GRPOConfig, RLOOConfig, RolloutConfig, SDPOConfig
from envgrad.config.async_grpo import ASYNC_REFUSED, ASYNC_RENAMED
from envgrad.config.sdpo import SDPO_REFUSED
from envgrad.config.trl_fields import TRL_DEFAULTS, TRL_REFUSED, TRL_RENAMED, TRL_VERSION, trl_field

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
CONFIGS = {"GRPO": GRPOConfig, "RLOO": RLOOConfig, "SDPO": SDPOConfig, "AsyncGRPO": AsyncGRPOConfig}
FROM_TRANSFORMERS = {field.name for field in fields(TrainingArguments)}
FROM_TRL = set().union(*TRL_DEFAULTS.values()) - FROM_TRANSFORMERS
RENAMED = TRL_RENAMED | ASYNC_RENAMED
ERRORS = REFUSED | IMPLIED | TRL_REFUSED | {name: why for name, (_, why) in (SDPO_REFUSED | ASYNC_REFUSED).items()}
TITLES = {
    "AsynchronousFields": "training beside rollouts",
    "MixtureFields": "several environments",
    "SamplerRatioFields": "where log-probs are not exact",
    "VLLMFields": "vLLM servers",
    "TrlNames": "trl's names",
}
"""of classes of fields whose source has no headings; another such class has its own name"""

INTRO = """# Every field of the configuration

<!-- Written by scripts/config_page.py from the configurations themselves; do not edit. -->

`GRPOConfig`, `RLOOConfig`, `SDPOConfig` and `AsyncGRPOConfig` are subclasses of `transformers.TrainingArguments`. Every
field is a flag of `envgrad train` (`max_turns` is `--max-turns`) and a key of its YAML file, and is checked at
construction. An option that cannot act is an error that says what to do instead. "trl" marks names and meanings that
trl {trl} has too; [from trl](from_trl.md) lists where its defaults differ. Defaults are GRPO's, then those of the
others that differ.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table of the page."""

    title: str
    names: tuple[str, ...]


def headings(config: type) -> dict[str, str]:
    """The heading of each field that the class itself declares: the comment ``# -- heading`` above it."""
    source = textwrap.dedent(inspect.getsource(config))
    lines = source.splitlines()
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    by_class = config.__name__.removesuffix("Fields").lower() if config.__name__.endswith("Fields") else ""
    found, heading, seen = {}, TITLES.get(config.__name__, by_class), 0
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            for line in lines[seen : field.lineno]:
                mark = re.fullmatch(r"\s*# -- (.*)", line)
                heading = mark[1] if mark else heading
            seen = field.lineno
            found[field.target.id] = heading
    return found


def sections(config: type, among: Iterable[str]) -> list[Section]:
    """The fields ``among`` those of ``config`` by their headings, in the order of the source."""
    wanted, found = set(among), dict[str, list[str]]()
    for base in config.__mro__:
        if base.__module__.startswith("envgrad."):
            for name, heading in headings(base).items():
                if name in wanted:
                    wanted.discard(name)
                    found.setdefault(heading, []).append(name)
    assert not wanted, f"fields without a place: {sorted(wanted)}"
    return [Section(title=title, names=tuple(names)) for title, names in found.items()]


def page() -> str:
    """The whole page."""
    every = {name: read_fields(config) for name, config in CONFIGS.items()}
    known = {field for of_config in every.values() for field in of_config}
    own = known - FROM_TRANSFORMERS - set(ERRORS) - set(RENAMED)
    shared = {field.name for field in fields(RolloutConfig)} & own
    parts = [INTRO.format(trl=TRL_VERSION), "## Of every algorithm\n"]
    for section in sections(RolloutConfig, shared):
        parts += [f"### {_title(section.title)}\n", _table(section.names, every)]
    parts += ["## Of single algorithms\n", "AsyncGRPO has those of GRPO.\n"]
    listed = set(shared)
    for name, config in CONFIGS.items():
        names = {field.name for field in fields(config)} & own - listed
        for section in sections(config, names):
            parts += [f"### {name}: {section.title or 'its own'}\n", _table(section.names, every, of_all=False)]
        listed |= names
    parts += ["## Other names that trl has\n", "They set the field that they stand for.\n", _renamed()]
    acting = sorted(FROM_TRANSFORMERS - set(REFUSED) - set(IMPLIED) - set(UNUSED))
    parts += [f"## Of transformers {transformers.__version__}\n", _table(acting, every)]
    parts += ["## Errors when set\n", "With any value but the default. (Of `do_train` and `do_predict`: as a flag.)\n"]
    parts += [_errors(known)]
    return "\n".join(parts)


def _table(names: Iterable[str], every: dict[str, dict[str, ConfigField]], *, of_all: bool = True) -> str:
    """One line a field; ``of_all=False`` adds which algorithms have it."""
    rows = []
    for name in names:
        of = {config: of_config[name] for config, of_config in every.items() if name in of_config}
        field = of.get("GRPO") or next(iter(of.values()))
        own = field.help if field.owner != "TrainingArguments" else ""
        meaning = own or TRANSFORMERS_HELP.get(name, "Not looked at yet: as in transformers.")
        mark = "trl" if name in FROM_TRL and trl_field(name).status == "same" else ""
        has = () if of_all else (", ".join(config for config in of if config != "AsyncGRPO"),)
        rows.append((f"`{name}`", *has, _takes(field), _defaults(of), mark, meaning))
    return _markdown(("field", *(() if of_all else ("of",)), "takes", "default", "", "meaning"), rows)


def _renamed() -> str:
    return _markdown(("trl's field", "sets"), [(f"`{name}`", f"`{ours}`") for name, ours in sorted(RENAMED.items())])


def _errors(known: Iterable[str]) -> str:
    rows = []
    for name, why in sorted((ERRORS | UNUSED).items()):
        if name in known:
            rows.append((f"`{name}`", "trl" if name in FROM_TRL else "transformers", _sentence(why)))
    return _markdown(("field", "of", "why, and what to do"), rows)


def _takes(field: ConfigField) -> str:
    if not field.kinds and not field.choices:
        return "two numbers" if field.name == "reward_clip_range" else "an object, in Python"
    return field.rule.removeprefix("must be ").replace("one of ", "")


def _defaults(of: dict[str, ConfigField]) -> str:
    shown = {config: _default(field.default) for config, field in of.items()}
    first = next(iter(shown.values()))
    others = [f"{config}: {value}" for config, value in shown.items() if value != first]
    return "; ".join([first, *others])


def _default(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str) and len(value) > 40:
        return "a template"
    return f"`{value!r}`" if not isinstance(value, str) else f'`"{value}"`'


def _title(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith(("trl", "vLLM")) else text


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def main() -> None:
    new = page()
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if new == old else f"{PAGE} is not up to date: run python scripts/config_page.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
