"""The front of the ``envgrad`` command: what it offers, and what its exit codes say.

Exit codes: 0 done; 1 the run failed (with a traceback), or what was checked, replayed or played does not hold; 2
something that was given cannot work (one line that says the fix); 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from envgrad import __version__
from envgrad.cli.plan_command import PLAN_EXAMPLE, plan
from envgrad.errors import ConfigurationError

app = typer.Typer(
    name="envgrad",
    help="Train language-model agents from environments: the environment owns the data, the reward and the end.",
    epilog=(
        "Start with: envgrad demo\n\n"
        "Exit codes: 0 done; 1 the run failed, or what was checked does not hold; 2 something that was given cannot "
        "work, in a line that says the fix; 130 interrupted.\n\n"
        "Completion of commands and options: envgrad --install-completion"
    ),
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


@app.command(epilog="Example: envgrad demo --seed 1 --output-dir runs/second")
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
    algorithm: Annotated[
        str | None, typer.Option(help="grpo, rloo or sdpo: whose options and defaults hold; grpo by default.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show settings, first prompt, memory and time; do nothing else.")
    ] = False,
    _help: Annotated[
        bool,
        typer.Option("--help", "-h", callback=_show_train_help, is_eager=True, help="Show this and every option."),
    ] = False,
) -> None:
    """Train a model on environments. Every field of its configuration is an option: --learning-rate 1e-5, --no-bf16."""
    from envgrad.cli.train import run_train

    run_train(
        model=model,
        environments=environment or [],
        config_file=config,
        arguments=ctx.args,
        algorithm=algorithm,
        dry_run=dry_run,
    )


@app.command(
    "eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: envgrad eval --model starter --environment envgrad.starter.compass:Compass --tasks 50 --samples 4",
)
def evaluate(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="A name, a folder, a checkpoint, a .gguf file, 'starter', or what --endpoint calls it."),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(help="module:Class, path/to/file.py:Class, or name=module:Class; repeat it for several."),
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="JSON lines whose rows feed reset; without it the environment owns the tasks.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Tasks to play; 200, or all rows of --dataset.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    split: Annotated[str, typer.Option(help="eval or train.")] = "eval",
    endpoint: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server that answers instead of a model here.")
    ] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the endpoint's key.")] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds that one answer of the endpoint may take; 300.")
    ] = None,
    patience: Annotated[
        float | None, typer.Option(help="Seconds that a failing request to the endpoint is repeated; 60.")
    ] = None,
    price_in: Annotated[float | None, typer.Option(help="Price of a million tokens read.")] = None,
    price_out: Annotated[float | None, typer.Option(help="Price of a million tokens written.")] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where episodes and figures go; runs/eval-... by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live display.")] = False,
) -> None:
    """Measure a model in environments: reward, pass@k, intervals, ends, tokens and cost. Nothing is trained.

    Sampling, limits and timeouts are options too, named as in `envgrad train`:
    --temperature 0, --max-turns 8, --max-completion-length 1024, --seed 1, ...
    """
    from envgrad.cli.eval import EvalRequest, run_eval
    from envgrad.evaluation.cost import Prices

    run_eval(
        EvalRequest(
            model=model,
            environments=environment or [],
            dataset=dataset,
            tasks=tasks,
            samples=samples,
            split=split,
            endpoint=endpoint,
            api_key_env=api_key_env,
            request_timeout=request_timeout,
            patience=patience,
            prices=Prices(per_million_in=price_in, per_million_out=price_out),
            output_dir=output_dir,
            as_json=as_json,
            plain=plain,
            arguments=ctx.args,
        )
    )


@app.command(epilog="Example: envgrad check envgrad.starter.compass:Compass")
def check(
    environment: Annotated[str, typer.Argument(help="module:Class or path/to/file.py:Class.", show_default=False)],
    row: Annotated[
        list[str] | None,
        typer.Option(help="A row of its dataset as JSON, if reset names columns; repeat it for several."),
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="Tasks to play.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Actions in an episode, at most.")] = 8,
    seed: Annotated[int, typer.Option(help="Decides tasks and actions.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one call may take.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Play an environment without a model: contract, determinism, isolation, and what idle agents earn.

    Exit code 1 if it breaks the contract.
    """
    from envgrad.cli.check import run_check

    run_check(environment, rows=row or [], groups=groups, turns=turns, seed=seed, timeout=timeout, as_json=as_json)


@app.command(epilog="Example: envgrad init number_game")
def init(
    path: Annotated[
        Path, typer.Argument(metavar="NAME", help="The folder, whose name the environment gets.", show_default=False)
    ],
) -> None:
    """Make a folder with an environment, its test, a configuration and a README, all of which work as they are."""
    from envgrad.cli.init import run_init

    run_init(path)


@app.command(epilog="Example: envgrad play envgrad.starter.compass:Compass   then type: move north")
def play(
    environment: Annotated[str, typer.Argument(help="module:Class or path/to/file.py:Class.", show_default=False)],
    row: Annotated[str | None, typer.Option(help="A row of its dataset as JSON, if reset names columns.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the tasks, as in a run with this --seed.")] = 42,
    task: Annotated[int, typer.Option(min=0, help="Which task of such a run: 0 is its first.")] = 0,
    split: Annotated[str, typer.Option(help="train or eval.")] = "train",
    max_turns: Annotated[int | None, typer.Option(min=1, help="Turns of the episode, as in training.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that one call of the environment may take.")] = None,
) -> None:
    """Play an environment yourself: see what the agent sees, call its tools, get its reward. No model is loaded.

    Exit code 0 if the episode was played or left, 1 if it failed or the input ended before it, 130 if interrupted.
    """
    from envgrad.cli.play import PlayRequest, run_play

    run_play(
        PlayRequest(
            environment=environment,
            row=row,
            seed=seed,
            task=task,
            split=split,
            max_turns=max_turns,
            timeout=timeout,
        )
    )


@app.command(epilog="Example: envgrad view runs/first   or, beside another run: envgrad view runs/first runs/second")
def view(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    other: Annotated[
        Path | None, typer.Argument(help="A second run, to be compared with the first.", show_default=False)
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; another than this machine lets others read the run.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The port; 8421, or a free one.")] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a window, if there is a screen.")
    ] = True,
) -> None:
    """Look at a run's episodes in the browser, while it trains or after: a page that this machine alone can open."""
    from envgrad.cli.view import run_view

    run_view([run] if other is None else [run, other], host=host, port=port, open_browser=browser)


@app.command(epilog="Example: envgrad replay runs/demo train/3/0")
def replay(
    run: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)],
    episode: Annotated[
        str, typer.Argument(help="Its number, or split/task/sibling such as train/3/0.", show_default=False)
    ],
    factory: Annotated[
        str | None,
        typer.Option(help="What makes the environment, where the run does not tell: module:Class or file.py:Class."),
    ] = None,
) -> None:
    """Play a recorded episode again without a model: its environment gets the same answers.

    Exit code 0 if it does the same, 1 if not (the first difference is shown), 2 if the episode cannot be played again.
    """
    from envgrad.cli.replay import run_replay

    run_replay(run, episode, factory=factory)


@app.command(epilog="Example: envgrad bench --model Qwen/Qwen3-0.6B --rows 16 --json")
def bench(
    model: Annotated[str, typer.Option(help="A name, a folder, a .gguf file, or 'starter'.")] = "starter",
    rows: Annotated[int, typer.Option(min=1, help="Prompts answered at once; groups of 8 are trained.")] = 32,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 64,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement; the quickest counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Torch's threads; its own choice by default.")] = None,
    use_cpu: Annotated[bool, typer.Option("--use-cpu", help="Measure the CPU even where there is a GPU.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure this machine, and a model's decoding and training on it, beside the least that they could take."""
    from envgrad.cli.bench import BenchRequest, run_bench

    run_bench(
        BenchRequest(
            model=model,
            rows=rows,
            prompt=prompt,
            answer=answer,
            repeats=repeats,
            threads=threads,
            use_cpu=use_cpu,
            as_json=as_json,
        )
    )


app.command(epilog=PLAN_EXAMPLE)(plan)


@app.command(
    "vllm-serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: envgrad vllm-serve --model Qwen/Qwen3-0.6B --max-model-len 8192 --dtype bfloat16",
)
def vllm_serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="The name or folder of the model that is trained, or 'starter'.")],
    python: Annotated[
        Path | None, typer.Option(help="The Python that has vLLM; $VLLM_PYTHON, .venv-vllm or this one by default.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; another than this machine needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 8000,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the server's key.")] = None,
    startup_timeout: Annotated[float, typer.Option(help="Seconds until it must be ready.")] = 1800.0,
    show: Annotated[bool, typer.Option("--show", help="Print vLLM's command line, and do nothing else.")] = False,
) -> None:
    """Start a vLLM server that a trainer can sample from and send weights to (sampler="vllm").

    All other options are vLLM's own: --max-model-len 8192, --dtype bfloat16, --enable-lora, --tensor-parallel-size 2.
    """
    from envgrad.cli.vllm_serve import ServeRequest, run_serve

    run_serve(
        ServeRequest(
            model=model,
            python=python,
            host=host,
            port=port,
            api_key_env=api_key_env,
            startup_timeout=startup_timeout,
            arguments=ctx.args,
        ),
        show=show,
    )


def main() -> NoReturn:
    """Run the command that ``sys.argv`` names and leave with its exit code."""
    try:
        app()
    except ConfigurationError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
    sys.exit(0)
