"""``envgrad eval``: how good a model is in environments, with how sure that is and what it cost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from envgrad.cli.eval_display import EvalDisplay, show_summary
from envgrad.cli.flags import nearest, parse_flags, read_fields
from envgrad.cli.locate import locate_environments
from envgrad.cli.results import fresh_folder, show_places
from envgrad.cli.text import printable
from envgrad.errors import ConfigurationError, TooManyFailures
from envgrad.evaluation.cost import Cost, Prices
from envgrad.evaluation.summary import EvaluationSummary, summarize

if TYPE_CHECKING:
    from envgrad.config.evaluation import EvalConfig
    from envgrad.rollout.runner import Round
    from envgrad.sampling.endpoint import Endpoint
    from envgrad.training.rollouts import Rollouts

FIELDS = (
    *("seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_strings", "max_context"),
    *("max_completion_length", "max_turns", "max_turn_tokens", "max_tool_calling_iterations"),
    *("episode_timeout", "tool_timeout", "reset_timeout", "reward_timeout", "close_timeout"),
    *("max_concurrent_episodes", "max_episode_retries", "max_consecutive_failed_groups"),
    *("episode_log_gb", "group_consistency", "isolate_generators", "environment_weights", "eval_success_reward"),
)
"""fields of the configuration that act in an evaluation"""
LOCAL_FIELDS = (
    *("model_init_kwargs", "trust_remote_code", "chat_template", "chat_template_kwargs", "tool_parser"),
    *("max_kv_tokens", "deterministic", "use_cpu", "bf16", "fp16"),
)
"""those that act on a model in this process only"""
OWN_FLAGS = (
    *("--model", "--environment", "--dataset", "--tasks", "--samples", "--split", "--endpoint", "--api-key-env"),
    *("--request-timeout", "--patience", "--price-in", "--price-out", "--output-dir", "--json", "--plain", "--help"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """What is asked for on the command line."""

    model: str | None
    environments: Sequence[str]
    dataset: Path | None = None
    tasks: int | None = None
    samples: int = 1
    split: str = "eval"
    endpoint: str | None = None
    api_key_env: str | None = None
    request_timeout: float | None = None
    patience: float | None = None
    prices: Prices = field(default_factory=Prices)
    output_dir: Path | None = None
    as_json: bool = False
    plain: bool = False
    arguments: Sequence[str] = ()
    """flags of the configuration's fields"""


def run_eval(request: EvalRequest) -> None:
    """Play, show the figures, and say where the episodes lie.

    Raises:
        ConfigurationError: anything that was given and cannot work.
        TooManyFailures: too many tasks in a row failed, or no episode could be scored.
        typer.Exit: code 130 if interrupted, after everything was closed.
    """
    if request.model is None:
        raise ConfigurationError("no model: give --model a name, a folder, a .gguf file, or 'starter'")
    factory = locate_environments(request.environments)
    rows = None if request.dataset is None else read_rows(request.dataset)
    names = "-".join(factory) if isinstance(factory, Mapping) else getattr(factory, "__name__", "environment").lower()
    folder = fresh_folder(request.output_dir or Path("runs") / f"eval-{names}")
    config = build_config(request, folder)
    endpoint = _endpoint(request, config)
    # Plain figures go to stdout, so that they can be piped; all else is for the eye.
    console = Console(stderr=request.as_json)
    live = console.is_terminal and not request.plain
    if not live:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    rollouts = _rollouts(request, config, factory, rows, endpoint)
    try:
        report = _play(request, config, rollouts, console, folder, live=live)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; what was written lies in {folder}", err=True)
        raise typer.Exit(130) from None
    finally:
        rollouts.close()
    data = {**_described(request, config), **report.summary.as_dict(), "cost": report.cost.as_dict()}
    path = folder / "evaluation.json"
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if request.as_json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    show_summary(console, report.summary, report.cost, success_reward=config.eval_success_reward)
    show_places(console, {"episodes": folder / "episodes", "figures": path})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    summary: EvaluationSummary
    cost: Cost


def _play(
    request: EvalRequest, config: EvalConfig, rollouts: Rollouts, console: Console, folder: Path, *, live: bool
) -> _Report:
    from envgrad.rollout.runner import Round
    from envgrad.training.episode_log import run_log
    from envgrad.training.evaluation import EndpointRollouts, eval_tasks, play_evaluation
    from envgrad.types import Group

    tasks = eval_tasks(rollouts, request.split, request.tasks)
    title = printable(f"{Path(request.model or '').name} on {', '.join(name for name in rollouts.specs)}")
    if request.tasks is not None and tasks.count < request.tasks:
        console.print(f"split {request.split!r} has {tasks.count} tasks: all are played, once", highlight=False)
    console.print(Text(f"evaluating {title}: {tasks.count} tasks, {request.samples} samples each"), soft_wrap=True)
    if config.temperature == 0 and request.samples > 1:
        console.print("temperature 0: samples of one task differ only where its environment does", highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    log = run_log(config, rollouts)
    display = EvalDisplay(title, tasks=tasks.count, console=console, live=live)

    def take(group: Group) -> None:
        log.write(Round(groups=(group,)), step=0)
        display.add(group)

    with contextlib.closing(log), display:
        played = play_evaluation(rollouts, tasks, on_group=take)
    summary = summarize(played, config.eval_success_reward)
    if summary.reward is None:
        raise _nothing_scored(played)
    if isinstance(rollouts, EndpointRollouts) and rollouts.answers is not None:
        usage, retries = rollouts.answers.usage, rollouts.answers.retries
        cost = Cost(
            tokens_in=usage.prompt_tokens,
            tokens_out=usage.completion_tokens,
            estimated=usage.estimated > 0,
            requests=usage.requests,
            retries=retries,
            seconds=played.seconds,
            prices=request.prices,
        )
    else:
        cost = Cost(
            tokens_in=summary.prompt_tokens + summary.result_tokens,
            tokens_out=summary.sampled_tokens,
            seconds=played.seconds,
            prices=request.prices,
        )
    return _Report(summary=summary, cost=cost)


def _nothing_scored(played: Round) -> TooManyFailures:
    failures = [failure for group in played.dropped for failure in group.failures]
    if not failures:
        return TooManyFailures("no episode has a reward: get_reward returned None for all of them")
    error = TooManyFailures(
        f"no episode has a reward: {len(failures)} failed after their retries; the last failure was: "
        f"{failures[-1].error}"
    )
    error.__cause__ = failures[-1].error
    return error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file.

    Raises:
        ConfigurationError: it cannot be read, has no rows, or a line that is no JSON object; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"--dataset {path} cannot be read: {why}; check the path") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"--dataset {path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigurationError(
                f"--dataset {path}, line {number} is a {type(row).__name__}; write one JSON object a line"
            )
        rows.append(row)
    if not rows:
        raise ConfigurationError(f"--dataset {path} has no rows; write one JSON object a line")
    return rows


def build_config(request: EvalRequest, folder: Path) -> EvalConfig:
    """The configuration from the flags that act here.

    Raises:
        ConfigurationError: an unknown flag, one that cannot act, or a value that cannot work.
    """
    from envgrad.config.evaluation import EvalConfig

    every = read_fields(EvalConfig)
    known = {name: every[name] for name in (*FIELDS, *LOCAL_FIELDS)}
    for word in request.arguments:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in every and name not in known:
            hint = nearest(word.partition("=")[0], [*(one.flag for one in known.values()), *OWN_FLAGS])
            raise ConfigurationError(f"--{name.replace('_', '-')} cannot act in an evaluation{hint}; remove it")
    values = parse_flags(request.arguments, known, also=OWN_FLAGS)
    if request.endpoint is not None:
        for name in values:
            if name in LOCAL_FIELDS:
                raise ConfigurationError(
                    f"{known[name].flag} cannot act with --endpoint: it is for a model in this process; remove it"
                )
    values |= {"num_generations_eval": request.samples, "output_dir": str(folder), "report_to": "none"}
    try:
        return EvalConfig(**values)
    except ConfigurationError:
        raise
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"{error} (from the options {', '.join(sorted(values))})") from error


def _endpoint(request: EvalRequest, config: EvalConfig) -> Endpoint | None:
    from envgrad.sampling.endpoint import Endpoint

    own = {
        "--api-key-env": request.api_key_env,
        "--request-timeout": request.request_timeout,
        "--patience": request.patience,
    }
    if request.endpoint is None:
        for flag, value in own.items():
            if value is not None:
                raise ConfigurationError(f"{flag} cannot act without --endpoint: the model runs in this process")
        return None
    limits = {"request_timeout": request.request_timeout, "patience": request.patience}
    return Endpoint(
        url=request.endpoint,
        model=request.model or "",
        api_key_env=request.api_key_env,
        max_context=config.max_context,
        **{name: value for name, value in limits.items() if value is not None},
    )


def _rollouts(
    request: EvalRequest, config: EvalConfig, factory: Any, rows: Sequence[Any] | None, endpoint: Endpoint | None
) -> Rollouts:
    from envgrad.training.evaluation import EndpointRollouts, local_rollouts
    from envgrad.training.inputs import UserInputs

    inputs = UserInputs(environment_factory=factory, train_dataset=rows, eval_dataset=rows)
    if endpoint is not None:
        return EndpointRollouts(endpoint, config, inputs)
    return local_rollouts(request.model or "", config, inputs)


def _described(request: EvalRequest, config: EvalConfig) -> dict[str, Any]:
    """What was measured, so that the figures can be made again."""
    return {
        "model": request.model,
        "endpoint": request.endpoint,
        "environment": list(request.environments),
        "dataset": None if request.dataset is None else str(request.dataset),
        "split": request.split,
        "samples": request.samples,
        "seed": config.seed,
        "success_reward": config.eval_success_reward,
        "temperature": config.temperature,
        "max_completion_length": config.max_completion_length,
        "max_turns": config.max_turns,
    }
