"""The options of ``envgrad plan``; ``cli.plan`` does what they ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PLAN_EXAMPLE = "Example: envgrad plan --model 8B --gpus 16 --environment-latency 2s --asynchronous"


def plan(
    model: Annotated[str, typer.Option(help="A size (8B), a folder with config.json, or 'starter'.")],
    gpus: Annotated[int, typer.Option(min=1, help="Devices in all.")] = 1,
    gpu: Annotated[str, typer.Option(help="h100, a100, h200, cpu, or TFLOPS,GB,GB/s.")] = "h100",
    trainer_gpus: Annotated[int | None, typer.Option(min=1, help="Devices that train; the best by default.")] = None,
    groups: Annotated[int, typer.Option(min=1, help="Tasks of a step.")] = 32,
    siblings: Annotated[int, typer.Option(min=1, help="Episodes of each.")] = 8,
    turns: Annotated[float, typer.Option(min=1, help="Answers of an episode, in the mean.")] = 4.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a task.")] = 500,
    turn_tokens: Annotated[float, typer.Option(min=1, help="Of an answer, in the mean.")] = 200.0,
    result_tokens: Annotated[int, typer.Option(min=0, help="Of what the environment says to one.")] = 100,
    environment_latency: Annotated[str, typer.Option(help="Of a call of the environment: 2s, 500ms, 1m.")] = "1s",
    spread: Annotated[float, typer.Option(min=0, help="Of answers and latencies: deviation over mean.")] = 0.5,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Episodes in play at most; all by default.")] = None,
    asynchronous: Annotated[bool, typer.Option("--asynchronous", help="Rollouts go on beside training.")] = False,
    max_staleness: Annotated[int, typer.Option(min=1, help="Publishes that a sample may be old, then.")] = 1,
    microbatch_tokens: Annotated[int, typer.Option(min=1, help="Of one forward on each device that trains.")] = 8192,
    save_steps: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: none.")] = 100,
    log_episodes: Annotated[bool, typer.Option(help="Write every episode to the log.")] = True,
    network: Annotated[float, typer.Option(help="GB/s into one machine.")] = 25.0,
    disk: Annotated[float, typer.Option(help="GB/s of the file system for checkpoints.")] = 2.0,
    measured: Annotated[
        Path | None,
        typer.Option(help="Measured figures: what bench --json printed, a checkpoint's folder, or fitted costs."),
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Of one device.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of the run, for its price.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Play it in simulated time too (needs simpy).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and nothing else.")] = False,
) -> None:
    """Predict a run on machines that nobody has started: step time, memory, who waits for whom, what is full, price.

    No model is loaded. Figures that were not measured are labelled as estimates.
    """
    from envgrad.cli.plan import PlanRequest, run_plan

    run_plan(
        PlanRequest(
            model=model,
            gpus=gpus,
            gpu=gpu,
            trainer_gpus=trainer_gpus,
            groups=groups,
            siblings=siblings,
            turns=turns,
            prompt_tokens=prompt_tokens,
            turn_tokens=turn_tokens,
            result_tokens=result_tokens,
            environment_latency=environment_latency,
            spread=spread,
            concurrency=concurrency,
            asynchronous=asynchronous,
            max_staleness=max_staleness,
            microbatch_tokens=microbatch_tokens,
            save_steps=save_steps,
            log_episodes=log_episodes,
            network=network,
            disk=disk,
            measured=measured,
            price_per_hour=price_per_hour,
            steps=steps,
            simulate=simulate,
            as_json=as_json,
        )
    )
