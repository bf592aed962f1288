"""``envgrad demo``: the model that ships with envgrad learns to read a compass, from success alone."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envgrad.cli.results import fresh_folder, save_results, show_next, show_places, show_plot, show_view
from envgrad.cli.transcript import headline, transcript
from envgrad.starter.compass import HELD_OUT, TASKS, Baselines, Compass, baselines

if TYPE_CHECKING:
    from envgrad.config import GRPOConfig
    from envgrad.rollout.runner import Round
    from envgrad.training.trainers import GRPOTrainer

DEFAULT_STEPS = 64
EVAL_TASKS = 200
LAST_STEPS = 5
ENVIRONMENT = "envgrad.starter.compass:Compass"


def demo_config(output_dir: Path, *, seed: int, steps: int) -> GRPOConfig:
    """The demo's settings: plain GRPO, 16 groups of 16 siblings, two passes over each round of episodes, no KL.

    On the CPU, to be the same everywhere.
    """
    from envgrad.config import GRPOConfig

    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=256,
        num_generations=16,
        max_completion_length=128,
        max_turns=8,
        temperature=1.0,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        num_iterations=2,
        eval_tasks=EVAL_TASKS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo found. Rewards are success rates."""

    first: float
    """the untrained model's, over the first step's episodes"""
    last: float
    """the mean over the last steps"""
    evaluation: float
    """the trained model's, on evaluation tasks"""
    baselines: Baselines
    """of policies that read no reply, on the same tasks"""
    """how many of the evaluation tasks have a start and a goal that training met too"""
    eval_tasks: int


def run_demo(*, seed: int, steps: int | None, output_dir: Path, plain: bool) -> None:
    """Train, evaluate, plot, and say where everything lies.

    Raises:
        typer.Exit: code 130 if interrupted, after everything was closed.
    """
    began = time.perf_counter()
    console = Console()
    folder = fresh_folder(output_dir)
    try:
        _demo(console, folder, seed=seed, steps=steps or DEFAULT_STEPS, live=console.is_terminal and not plain)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; what was written lies in {folder}", err=True)
        raise typer.Exit(130) from None
    console.print(f"\ndone in {time.perf_counter() - began:.0f} seconds", highlight=False)


def _demo(console: Console, folder: Path, *, seed: int, steps: int, live: bool) -> None:
    _introduce(console)
    import torch
    from transformers import PrinterCallback
    from transformers.utils import logging as transformers_logging

    from envgrad.cli.display import RunDisplay
    from envgrad.training.trainers import GRPOTrainer

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # its matrices are too small to share: a second thread costs more than it brings
    display = RunDisplay("GRPO: starter on Compass", console=console, live=live)
    config = demo_config(folder, seed=seed, steps=steps)
    trainer = GRPOTrainer("starter", args=config, environment_factory=Compass, callbacks=[display])
    trainer.remove_callback(PrinterCallback)
    display.attach(trainer)
    try:
        with display:
            trainer.train()
        console.print(f"\nplaying {EVAL_TASKS} evaluation tasks ...", highlight=False)
        played = trainer.play_eval()
        places = save_results(trainer, folder)
        result = _result(trainer, display.figures.rewards, played)
    finally:
        trainer.close()
    _show_episode(console, played)
    _show_result(console, result)
    references = {"best blind policy": result.baselines.reply_blind, "random": result.baselines.random}
    title = "GRPO: starter on Compass"
    places |= show_plot(console, display.figures, folder / "reward.png", title=title, references=references)
    show_places(console, places)
    show_view(console, folder, places)
    _show_next(console, places["model"])


def _introduce(console: Console) -> None:
    source = inspect.getsourcefile(Compass)
    console.print(Text("A model of 0.1 million parameters learns from an environment alone.", style="bold"))
    console.print(
        Text(
            "Compass: a 4x4 grid, an unseen goal, six moves. Each reply to move(direction) says where the goal lies. "
            "The model writes well-formed calls and knows nothing else: it must find out what the replies mean. The "
            "reward is 1 for reaching the goal, else 0; the environment makes its own tasks."
        )
    )
    console.print(Text(f"The environment: {source}", style="dim"), soft_wrap=True)


def _result(trainer: GRPOTrainer, rewards: Sequence[float], played: Round) -> DemoResult:
    episodes = [episode for group in played.groups for episode in group.episodes]
    seeds = [group.task.seed for group in played.groups]
    return DemoResult(
        first=rewards[0],
        last=fmean(rewards[-LAST_STEPS:]),
        evaluation=fmean(episode.reward or 0.0 for episode in episodes),
        baselines=baselines(seeds, "eval"),
        eval_tasks=len(seeds),
    )


def _show_episode(console: Console, played: Round) -> None:
    episode = max((episode for group in played.groups for episode in group.episodes), key=lambda one: len(one.turns))
    console.print()
    console.print(Text(f"One of its evaluation episodes: {headline(episode)}", style="bold"))
    console.print(transcript(episode, max_lines=16))


def _show_result(console: Console, result: DemoResult) -> None:
    title = f"Success on {result.eval_tasks} evaluation tasks, which training never drew"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("success", justify="right")
    rows = (
        ("the trained model", result.evaluation, "bold green"),
        ("best fixed sequence of moves, chosen with hindsight", result.baselines.reply_blind, ""),
        ("best constant move", result.baselines.constant, ""),
        ("random moves", result.baselines.random, ""),
    )
    for name, value, style in rows:
        table.add_row(Text(name, style=style), Text(f"{value:.3f}", style=style))
    console.print()
    console.print(table)
    console.print(
        Text(
            "No policy that ignores the replies beats the second row. Training and evaluation share no task: "
            f"{len(HELD_OUT)} of the {len(TASKS)} pairs of start and goal are drawn in evaluation only.",
            style="dim",
        )
    )
    console.print()
    console.print(
        Text(f"reward in training: {result.first:.3f} at step 1, {result.last:.3f} over the last {LAST_STEPS} steps")
    )


def _show_next(console: Console, model: Path) -> None:
    """An example of the repository where that is at hand, else the demo's own environment."""
    example = Path("examples/guess_number.py")
    sizes = ["--max-steps", "50", "--per-device-train-batch-size", "128", "--num-generations", "16"]
    limits = ["--max-completion-length", "128", "--learning-rate", "1e-3"]
    if example.is_file():
        words = ["train", "--model", "starter", "--environment", f"{example}:GuessNumber", *sizes, *limits]
        show_next(console, words, why=f"Next: read {example}, an environment on one page, and train on it")
    else:
        words = ["train", "--model", str(model), "--environment", ENVIRONMENT, *sizes, *limits]
        show_next(console, words, why="Next: train further; --environment takes any class, module:Class")
