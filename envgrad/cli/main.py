"""The front of the ``envgrad`` command: what it offers, and what its exit codes say.

Exit codes: 0 done; 1 the run failed (with a traceback); 2 something that was given cannot work (one line that says the
fix); 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from envgrad import __version__
from envgrad.errors import ConfigurationError

app = typer.Typer(
    name="envgrad",
    help="Train language-model agents from environments: the environment owns the data, the reward and the end.",
    epilog="Start with: envgrad demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"envgrad {__version__}")
        raise typer.Exit


@app.callback()
def front(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train language-model agents from environments: the environment owns the data, the reward and the end."""


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Decides every draw of the run.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; enough to learn by default.")] = None,
    output_dir: Annotated[
        Path, typer.Option(help="Where model, episodes and plot go; a numbered folder beside it if it is taken.")
    ] = Path("runs/demo"),
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live display.")] = False,
) -> None:
    """Watch the model that ships with envgrad learn from an environment alone: about a minute on two cores."""
    from envgrad.cli.demo import run_demo

    run_demo(seed=seed, steps=steps, output_dir=output_dir, plain=plain)


def _show_train_help(ctx: typer.Context, value: bool) -> None:
    if value:
        from envgrad.cli.train_help import show_train_help

        show_train_help(ctx.get_help())
        raise typer.Exit


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: envgrad train --model starter --environment envgrad.starter.compass:Compass --max-steps 20",
)
def train(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A name, a folder, a .gguf file, or 'starter' (the model that ships along).")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(help="module:Class, path/to/file.py:Class, or name=module:Class; repeat it to train on several."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with model, environment and any option; flags override it.")
    ] = None,
    _help: Annotated[
        bool,
        typer.Option("--help", "-h", callback=_show_train_help, is_eager=True, help="Show this and every option."),
    ] = False,
) -> None:
    """Train a model on environments. Every field of GRPOConfig is an option: --learning-rate 1e-5, --no-bf16, ..."""
    from envgrad.cli.train import run_train

    run_train(model=model, environments=environment or [], config_file=config, arguments=ctx.args)


def main() -> NoReturn:
    """Run the command that ``sys.argv`` names and leave with its exit code."""
    try:
        app()
    except ConfigurationError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
    sys.exit(0)
