"""``envgrad train``: from flags and a YAML file to a trainer, shown while it runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from envgrad.cli.algorithms import config_class, trainer_class
from envgrad.cli.field_words import UNUSED
from envgrad.cli.flags import convert, nearest, parse_flags, read_fields
from envgrad.cli.locate import locate_environments
from envgrad.cli.results import fresh_folder, save_results, show_next, show_places, show_plot, show_view
from envgrad.cli.text import printable
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.config import RolloutConfig

_OWN = ("--model", "--environment", "--config", "--algorithm", "--dry-run", "--help")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What is asked for, flags over file."""

    model: str
    environments: tuple[str, ...]
    values: dict[str, Any]
    """fields of the configuration that were given"""
    algorithm: str = "grpo"


def run_train(
    *,
    model: str | None,
    environments: Sequence[str],
    config_file: Path | None,
    arguments: Sequence[str],
    algorithm: str | None = None,
    dry_run: bool = False,
) -> None:
    """Train, and say where everything lies; with ``dry_run`` only show what the run would do.

    Raises:
        ConfigurationError: anything that was given and cannot work.
        typer.Exit: code 130 if interrupted, after everything was closed.
    """
    request = read_request(
        model=model, environments=environments, config_file=config_file, arguments=arguments, algorithm=algorithm
    )
    factory = locate_environments(request.environments)
    values = dict(request.values)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and "output_dir" not in values:
        raise ConfigurationError(
            f"{processes} processes were started, and all need one folder: give --output-dir, such as runs/first"
        )
    values.setdefault("output_dir", str(fresh_folder(Path("runs") / _run_name(factory))))
    config = build_config(values, request.algorithm)
    if dry_run:
        from envgrad.cli.dry_run import run_dry_run

        if not config.process_index:
            run_dry_run(request.model, request.values, config, factory)
        return
    if config.process_index:  # one process speaks for all
        logging.getLogger("envgrad").setLevel(logging.ERROR)
    console = Console(quiet=config.process_index > 0)
    live = console.is_terminal and not config.disable_tqdm
    config.disable_tqdm = True  # transformers' own bar and prints would draw over the display
    try:
        _train(request, config, factory, console, live=live)
    except KeyboardInterrupt:
        if not config.process_index:
            typer.echo(f"interrupted; what was written lies in {config.output_dir}", err=True)
        raise typer.Exit(130) from None


def read_request(
    *,
    model: str | None,
    environments: Sequence[str],
    config_file: Path | None,
    arguments: Sequence[str],
    algorithm: str | None = None,
) -> TrainRequest:
    """Merge flags and file, each value converted to its field's type.

    Raises:
        ConfigurationError: an unknown option or key, a value that does not fit, no model.
    """
    given = _read_file(config_file) if config_file is not None else {}
    algorithm = str(algorithm or given.pop("algorithm", "grpo"))
    given.pop("algorithm", None)
    fields = read_fields(config_class(algorithm))
    file_model, file_environments = given.pop("model", None), given.pop("environment", None)
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            hint = nearest(name, [*fields, "model", "environment", "algorithm"])
            raise ConfigurationError(f"{config_file}: unknown key {key!r}{hint or '; see `envgrad train --help`'}")
        values[name] = convert(fields[name], value)
    values |= parse_flags(arguments, fields, also=_OWN)
    for name, reason in UNUSED.items():
        if name in values:
            raise ConfigurationError(f"{name}={values[name]!r} cannot act: {reason}")
    model = model or (None if file_model is None else str(file_model))
    if model is None:
        raise ConfigurationError("no model: give --model a name, a folder, a .gguf file, or 'starter'")
    specs = tuple(environments) or _file_environments(file_environments, config_file)
    return TrainRequest(model=model, environments=specs, values=values, algorithm=algorithm)


def _read_file(path: Path) -> dict[Any, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error.strerror}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigurationError(f"--config {path} holds a {type(loaded).__name__}; write one `option: value` a line")
    return loaded


def _file_environments(value: object, path: Path | None) -> tuple[str, ...]:
    """The file's ``environment``: text, a list of texts, or a mapping from names."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(spec, str) for spec in value):
        return tuple(value)
    if isinstance(value, Mapping):
        return tuple(f"{name}={spec}" for name, spec in value.items())
    raise ConfigurationError(
        f"{path}: environment {value!r} does not fit: write module:Class, a list of them, or a mapping from names"
    )


def _run_name(factory: object) -> str:
    if isinstance(factory, Mapping):
        return "-".join(factory)
    return str(getattr(factory, "__name__", "environment")).lower()


def build_config(values: Mapping[str, Any], algorithm: str = "grpo") -> RolloutConfig:
    """The configuration; what ``transformers`` finds wrong is worded as what we find wrong.

    Raises:
        ConfigurationError: a value that cannot work.
    """
    try:
        return config_class(algorithm)(**values)
    except ConfigurationError:
        raise
    except (TypeError, ValueError, ImportError) as error:  # a value of another type cannot be compared
        raise ConfigurationError(f"{error} (from the options {', '.join(sorted(values))})") from error


def _train(
    request: TrainRequest,
    config: RolloutConfig,
    factory: Callable[[], object] | dict[str, Callable[[], object]],
    console: Console,
    *,
    live: bool,
) -> None:
    from transformers import PrinterCallback
    from transformers.utils import logging as transformers_logging

    from envgrad.cli.display import RunDisplay

    if not live:
        transformers_logging.disable_progress_bar()
    names = ", ".join(spec.rpartition(":")[2] for spec in request.environments)
    title = printable(f"{Path(request.model).name} on {names}")
    display = RunDisplay(title, console=console, live=live)
    trainer = trainer_class(config)(request.model, args=config, environment_factory=factory, callbacks=[display])
    trainer.remove_callback(PrinterCallback)
    display.attach(trainer)
    folder = Path(config.output_dir or "")
    console.print(Text(f"training {title}: {trainer.args.max_steps} steps, into {folder}"), soft_wrap=True)
    try:
        with display:
            trainer.train(resume_from_checkpoint=_resume(config.resume_from_checkpoint))
            if request.values.get("do_eval"):
                trainer.evaluate()
        places = save_results(trainer, folder)
    finally:
        trainer.close()
        if not trainer.rollouts.tally.is_clean:
            console.print("\n".join(trainer.rollouts.tally.lines()), markup=False, highlight=False)
    if config.world_size > 1:
        trainer.accelerator.end_training()
    if config.process_index:
        return
    places |= show_plot(console, display.figures, folder / "reward.png", title=title)
    show_places(console, places)
    show_view(console, folder, places)
    show_next(console, _continue_words(request, places["model"]), why="To train the result further")


def _resume(value: str | None) -> str | bool | None:
    """``true`` is the last checkpoint in ``output_dir``, as everywhere in transformers."""
    words: dict[str | None, str | bool | None] = {"true": True, "True": True, "false": None, "False": None}
    return words.get(value, value)


def _continue_words(request: TrainRequest, model: Path) -> list[str]:
    """The same run, from the model that was just trained; settings without a short form in text are left out."""
    words = ["train", "--model", str(model)]
    for spec in request.environments:
        words += ["--environment", spec]
    if request.algorithm != "grpo":
        words += ["--algorithm", request.algorithm]
    for name, value in request.values.items():
        flag = name.replace("_", "-")
        if name in ("output_dir", "resume_from_checkpoint", "run_name"):
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (str, int, float)):
            words += [f"--{flag}", str(value)]
    return words
