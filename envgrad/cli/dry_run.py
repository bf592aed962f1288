"""``envgrad train --dry-run``: the settings, the first prompt as text and as tokens, and what a step will take.

No weights are loaded and no episode is played; one environment is made, and reset to the first task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from envgrad.cli.flags import ConfigField, read_fields
from envgrad.cli.text import clock, figure, printable
from envgrad.cli.transcript import STYLES

if TYPE_CHECKING:
    from envgrad.config import RolloutConfig
    from envgrad.training.estimates import Lengths, MemoryItem, StepTime
    from envgrad.training.preview import Preview

_FULL_TOKENS = 1200
"""tokens of a prompt that are shown; of a longer one, the beginning and the end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimates:
    parameters: int
    lengths: Lengths
    memory: Sequence[MemoryItem]
    time: StepTime | None


def run_dry_run(
    model: str,
    given: Mapping[str, object],
    config: RolloutConfig,
    factory: Callable[[], object] | dict[str, Callable[[], object]],
    console: Console | None = None,
) -> None:
    """Show what the run would do.

    Args:
        model: A name, a folder, a ``.gguf`` file, or ``"starter"``.
        given: The fields that the user set.
        config: The resolved configuration.
        factory: The environment, or several by name.
        console: Where it is shown; the standard output if None.

    Raises:
        ConfigurationError: what would keep the run from starting.
        EpisodeFailure: the environment's ``reset`` failed.
    """
    from envgrad.training.inputs import UserInputs
    from envgrad.training.preview import outline_policy, preview

    out = console or Console()
    show_settings(out, config, given)
    with redirect_stdout(sys.stderr):  # an environment may print
        policy = outline_policy(model, config)
        seen = preview(policy, config, UserInputs(environment_factory=factory))
        estimates = _estimate(policy.base, config, seen)
    show_prompt(out, seen)
    _show_estimates(out, config, estimates)
    out.print(Text("Nothing was played, trained or written.", style="dim italic"))


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


# -- settings


def show_settings(console: Console, config: RolloutConfig, given: Mapping[str, object]) -> None:
    """What differs from the defaults, then envgrad's own fields that do not."""
    from envgrad.config import REFUSED, TRL_REFUSED

    fields = [one for one in read_fields(type(config)).values() if one.name not in REFUSED | TRL_REFUSED]
    different = [one for one in fields if _differs(one, config, given)]
    console.print(Text("Settings that differ from the defaults", style="bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_column(style="dim", overflow="fold")
    for one in sorted(different, key=lambda field: field.name not in given):
        default = "no default" if one.default is None else f"default {_shown(one.default)}"
        origin = default if one.name in given else "follows from the others"
        grid.add_row(Text(one.name, style="cyan"), Text(_shown(getattr(config, one.name))), Text(origin))
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    rest = [one for one in fields if one not in different]
    ours = [one for one in rest if one.owner != "TrainingArguments" and getattr(config, one.name) is not None]
    _title(console, "As by default")
    words = [Text(f"{one.name}={_shown(getattr(config, one.name))}") for one in ours]
    console.print(Padding(Text(", ").join(words), (0, 0, 0, 2), expand=False), style="dim")
    unset = len(rest) - len(ours)
    more = f"and {unset} more that are unset or transformers' own: envgrad train --help lists them"
    console.print(Padding(Text(more, style="dim italic"), (0, 0, 0, 2), expand=False))


def _differs(field: ConfigField, config: RolloutConfig, given: Mapping[str, object]) -> bool:
    """Set by the user, or, of envgrad's own, resolved from other fields."""
    resolved = field.owner != "TrainingArguments" and _shown(getattr(config, field.name)) != _shown(field.default)
    return field.name in given or resolved


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    return printable(" ".join(str(value).split()))


# -- the prompt


def show_prompt(console: Console, seen: Preview) -> None:
    """The first task's messages and tools, then the prompt as the model reads it."""
    name = printable(seen.task.environment)
    _title(console, f"The first prompt: {name}, task {seen.task.key}")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for message in seen.opening.messages:
        role = printable(str(message.get("role", "")))
        text = printable(str(message.get("content") or ""))
        grid.add_row(Text(role, style=STYLES.get(role, "dim")), Text(text or "(empty)"))
    for tool in seen.opening.tools:
        about = printable(str(tool.schema["function"].get("description") or ""))
        grid.add_row(Text("tool", style=STYLES["tool"]), Text(f"{printable(tool.signature)}  {about}".strip()))
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    _title(console, "The same as the template renders it")
    console.print(Padding(Text(printable(seen.text)), (0, 0, 0, 2), expand=False))
    _title(console, f"The same as {len(seen.pieces):,} tokens")
    console.print(Padding(token_view(seen.pieces), (0, 0, 0, 2), expand=False))


def token_view(pieces: Sequence[str], limit: int = _FULL_TOKENS) -> Text:
    """The tokens' texts with a bar behind each; a line break within one is shown, and made.

    Example:
        >>> token_view(["<user>", "\\n", "Hi", " there"]).plain
        '<user>|\\\\n|\\nHi| there|'
    """
    view, bar = Text(), ("|", "bold red")
    shown = list(enumerate(pieces))
    if len(pieces) > limit:
        shown = [*shown[: limit // 2], *shown[-(limit // 2) :]]
    before = -1
    for number, piece in shown:
        if number != before + 1:
            view.append(f"\n... {number - before - 1:,} more tokens ...\n", style="dim italic")
        before = number
        text = printable(piece)
        breaks = text.count("\n")
        view.append(text.replace("\n", "\\n"))
        view.append(*bar)
        if breaks:
            view.append("\n")
    return view


# -- estimates


def _estimate(model: object, config: RolloutConfig, seen: Preview) -> _Estimates:
    from transformers import PreTrainedModel

    from envgrad.sampling.limits import text_config
    from envgrad.training.estimates import (
        compute_dtype,
        estimate_memory,
        estimate_step,
        lengths_of,
        round_episodes,
    )
    from envgrad.training.flops import matmul_rate

    if not isinstance(model, PreTrainedModel):
        raise AssertionError("a policy's base is a transformers model")
    limit = getattr(text_config(model), "max_position_embeddings", None)
    lengths = lengths_of(config, len(seen.pieces), limit if isinstance(limit, int) else None)
    algorithm = config.algorithm()
    memory = estimate_memory(
        model,
        config,
        lengths,
        in_flight=round_episodes(config, seen.in_flight),
        references=int(algorithm.needs_reference or algorithm.credit_reads_reference),
    )
    rate = matmul_rate(config.device, compute_dtype(model, config))
    return _Estimates(
        parameters=model.num_parameters(),
        lengths=lengths,
        memory=memory,
        time=estimate_step(model, config, lengths, rate),
    )


def _show_estimates(console: Console, config: RolloutConfig, found: _Estimates) -> None:
    _title(console, "Memory, estimated from the model's sizes and the longest episodes")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim", overflow="fold")
    for item in found.memory:
        grid.add_row(item.name, "unknown" if item.size is None else byte_count(item.size), Text(item.of))
    known = sum(item.size or 0 for item in found.memory)
    less = "" if all(item.size is not None for item in found.memory) else "at least "
    together = Text(f"{less}{byte_count(known)}", style="bold")
    grid.add_row("together", together, "at most at once, without what Python takes")
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
    _title(console, "Time of a step, as estimated")
    console.print(Padding(Text(_time_words(config, found)), (0, 0, 0, 2), expand=False))


def _time_words(config: RolloutConfig, found: _Estimates) -> str:
    time, lengths = found.time, found.lengths
    if time is None:
        return "unknown: the model's configuration does not tell its operations (mixtures of experts, for example)"
    return (
        f"{config.episodes_per_step} episodes of {lengths.prompt:,} prompt and at most {lengths.completion:,} further "
        f"tokens. At {time.rate / 1e9:,.0f} Gflop/s, measured now on this machine, the operations alone take "
        f"{seconds(time.sampling)} for sampling and {seconds(time.training)} for training, were every episode as long "
        "as it may be. Shorter episodes take less; decoding word by word, tools and the optimizer take more: "
        "`envgrad bench` measures the model's tokens per second."
    )


def seconds(value: float) -> str:
    """A duration in words.

    Example:
        >>> seconds(0.25), seconds(75.0)
        ('0.250 s', '1:15 minutes')
    """
    return f"{figure(value)} s" if value < 60 else f"{clock(value)} {'minutes' if value < 3600 else 'hours'}"


def byte_count(size: int) -> str:
    """Bytes in the unit that fits.

    Example:
        >>> byte_count(512), byte_count(3_500_000), byte_count(2_400_000_000)
        ('0.5 kB', '3.5 MB', '2.4 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"
