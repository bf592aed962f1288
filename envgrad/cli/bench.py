"""``envgrad bench``: what this machine does, and how near decoding and training come to it."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envgrad.cli.text import figure, printable

if TYPE_CHECKING:
    from envgrad.training.speed import ModelSpeed, Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What is measured."""

    model: str = "starter"
    rows: int = 32
    prompt: int = 64
    answer: int = 64
    repeats: int = 3
    threads: int | None = None
    use_cpu: bool = False
    as_json: bool = False


def run_bench(request: BenchRequest) -> None:
    """Measure, and print a table or JSON.

    Raises:
        ConfigurationError: a model that cannot be loaded, or rows that do not fit it.
    """
    with redirect_stdout(sys.stderr):
        found = _measure(request)
    if request.as_json:
        typer.echo(json.dumps(described(request, found), indent=2))
    else:
        show_speed(Console(), request, found)


def _measure(request: BenchRequest) -> ModelSpeed:
    import torch

    from envgrad.config import GRPOConfig
    from envgrad.training.model import load_policy
    from envgrad.training.speed import Load, measure

    load = Load(rows=request.rows, prompt=request.prompt, answer=request.answer, repeats=request.repeats)
    before = torch.get_num_threads()
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory())
        if request.threads is not None:
            undo.callback(torch.set_num_threads, before)
            torch.set_num_threads(request.threads)
        config = GRPOConfig(output_dir=folder, report_to="none", use_cpu=request.use_cpu)
        policy = load_policy(request.model, None, config, None)
        model = policy.base.to(config.device)
        return measure(model, load, autocast=torch.bfloat16 if config.bf16 else None)


def described(request: BenchRequest, found: ModelSpeed) -> dict[str, Any]:
    """The measurement as JSON has it."""
    return {
        "model": request.model,
        "parameters": found.parameters,
        "rows": request.rows,
        "prompt": request.prompt,
        "answer": request.answer,
        "machine": asdict(found.machine),
        "decoding": found.decoding.as_dict(),
        "training": found.training.as_dict(),
    }


def show_speed(console: Console, request: BenchRequest, found: ModelSpeed) -> None:
    """The machine in a line, then a table."""
    machine = found.machine
    threads = f", {machine.threads} thread{'s' * (machine.threads > 1)}" if machine.device == "cpu" else ""
    console.print(
        Text(
            f"{machine.device}{threads}: {machine.matmul / 1e9:,.0f} Gflop/s in {machine.dtype} matrix products, "
            f"{machine.reads / 1e9:,.1f} GB/s read"
        )
    )
    name = printable(Path(request.model).name)
    console.print(
        Text(
            f"{name}: {found.parameters:,} parameters; {request.rows} rows of {request.prompt} prompt and "
            f"{request.answer} sampled tokens"
        )
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for title in ("", "tokens/s", "seconds", "floor", "floor's share"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_row(*_cells("decoding", found.decoding))
    table.add_row(*_cells("training", found.training))
    console.print(table)
    console.print(
        Text(
            "The floor is what the operations alone take at that rate; a share of 100% cannot be passed. Training is "
            "forward and backward of the sampled tokens, without the optimizer. The quickest of several counts.",
            style="dim",
        )
    )


def _cells(name: str, speed: Speed) -> tuple[str, ...]:
    share = speed.share
    return (
        name,
        figure(speed.rate),
        figure(speed.seconds),
        "unknown" if speed.floor is None else figure(speed.floor),
        "unknown" if share is None else f"{share:.0%}",
    )
