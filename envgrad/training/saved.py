"""What a checkpoint holds of the rollouts, as files: JSON that says what there is, safetensors with the numbers.

::

    rollout_state.json                  the tasks' position, the algorithm's own state, which of the others there are
    rollout_steps.{json,safetensors}    optimizer steps of a round in hand that are not made yet
    rollout_groups.{json,safetensors}   finished groups that no round has taken (asynchronous runs)

Each JSON file names its kind and version, and the size and hash of its tensors; what is torn or foreign is a
``CheckpointError``. Nothing is pickled, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from envgrad.batch import Batch
from envgrad.environments.sources import State
from envgrad.environments.tasks import TaskStream
from envgrad.errors import CheckpointError, first_line
from envgrad.training.buffer import Unconsumed
from envgrad.training.records import NotPlain, RecordReader, RecordWriter, check_keys, count, expect, plain
from envgrad.training.rounds import RoundsState
from envgrad.training.run_shape import Shape, check_shape
from envgrad.training.stream import StepItem
from envgrad.types import Episode, Group

SCHEMA = 1
"""version of these files"""
STATE_NAME = "rollout_state.json"
STEPS, GROUPS = "rollout_steps", "rollout_groups"
_UNPICKLED = "rollout_steps.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """All that a run needs beside the Trainer's own files to go on."""

    rounds: RoundsState
    algorithm: Mapping[str, float] = field(default_factory=dict)
    pending: Sequence[StepItem] = ()
    """optimizer steps that were played for and not made yet; they come back without their episodes"""
    environments: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """what ``state_dict`` of each environment's instances gave"""
    unlogged: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """metrics that were recorded since the last log, by name"""
    shape: Shape = field(default_factory=dict)
    """how the run's rounds are cut into optimizer steps"""


def write_state(state: RolloutState, folder: Path) -> None:
    """Write ``state``'s files to ``folder``.

    Raises:
        OSError: it cannot be written.
    """
    tasks, files = state.rounds.tasks, []
    if state.pending:
        _write_steps(state.pending, folder)
        files.append(STEPS)
    if state.rounds.unconsumed is not None:
        tasks = _write_groups(state.rounds, state.rounds.unconsumed, folder)
        files.append(GROUPS)
    body = {
        "tasks": tasks,
        "algorithm": dict(state.algorithm),
        "environments": dict(state.environments),
        "unlogged": {name: list(values) for name, values in state.unlogged.items()},
        "shape": dict(state.shape),
    }
    _write_json(folder / STATE_NAME, "state", {**body, "files": files})


def read_state(folder: Path, tasks: TaskStream, shape: Shape | None = None) -> RolloutState:
    """What ``write_state`` wrote.

    Args:
        folder: The checkpoint.
        tasks: The run's; those of saved groups are drawn from it again, so its position has to be loaded behind this.
        shape: How the rounds of the run that is resumed are cut; None: not compared.

    Raises:
        FileNotFoundError: the checkpoint was not written by envgrad.
        CheckpointError: a file is missing, torn, of another version, or no such file; or it was written by a run whose
            rounds were cut in another way.
        ConfigurationError: it was written with other tasks.
    """
    path = folder / STATE_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the tasks' position is not known, so this run cannot be resumed")
    if (folder / _UNPICKLED).exists():
        raise CheckpointError(
            f"{folder / _UNPICKLED} holds steps as a pickle, which an early version wrote and none reads: it could run "
            "any code. Delete it to go on without those steps, or resume from another checkpoint"
        )
    body = _read_json(path, "state")
    check_keys(body, ("tasks", "algorithm", "environments", "unlogged", "shape", "files"), str(path))
    files = expect(body["files"], list, f"{path}: files")
    algorithm = {
        key: float(expect(value, (int, float), f"{path}: algorithm.{key}"))
        for key, value in expect(body["algorithm"], dict, f"{path}: algorithm").items()
    }
    environments = {
        name: expect(states, list, f"{path}: environments.{name}")
        for name, states in expect(body["environments"], dict, f"{path}: environments").items()
    }
    saved = {
        name: expect(value, (int, float, str), f"{path}: shape.{name}")
        for name, value in expect(body["shape"], dict, f"{path}: shape").items()
    }
    unlogged = {
        name: [
            float(expect(one, (int, float), f"{path}: unlogged.{name}"))
            for one in expect(values, list, f"{path}: unlogged.{name}")
        ]
        for name, values in expect(body["unlogged"], dict, f"{path}: unlogged").items()
    }
    if shape is not None:
        check_shape(saved, shape, in_hand=bool(files), checkpoint=folder)
    rounds = RoundsState(tasks=expect(body["tasks"], dict, f"{path}: tasks"))
    if GROUPS in files:
        rounds = _read_groups(folder, rounds.tasks, tasks)
    pending = _read_steps(folder) if STEPS in files else []
    return RolloutState(
        rounds=rounds, algorithm=algorithm, pending=pending, environments=environments, unlogged=unlogged, shape=saved
    )


# -- steps


def _write_steps(steps: Sequence[StepItem], folder: Path) -> None:
    """Passes over one round share its batches; each is written once."""
    writer = RecordWriter()
    batches = list({id(step.batch): step.batch for step in steps}.values())
    index = {id(batch): number for number, batch in enumerate(batches)}
    items = [
        {
            "batch": index[id(step.batch)],
            "iteration": step.iteration,
            "seconds": dict(step.seconds),
            "metrics": dict(step.metrics),
        }
        for step in steps
    ]
    body = {"batches": [writer.write(Batch, batch) for batch in batches], "steps": items}
    _write_records(folder, STEPS, body, writer.tensors())


def _read_steps(folder: Path) -> list[StepItem]:
    body, tensors = _read_records(folder, STEPS)
    where = f"{folder / STEPS}.json"
    check_keys(body, ("batches", "steps"), where)
    reader = RecordReader(tensors)
    batches: list[Batch] = [
        reader.read(Batch, data, f"{where}: batches[{number}]")
        for number, data in enumerate(expect(body["batches"], list, f"{where}: batches"))
    ]
    steps = []
    for number, data in enumerate(expect(body["steps"], list, f"{where}: steps")):
        place = f"{where}: steps[{number}]"
        check_keys(data, ("batch", "iteration", "seconds", "metrics"), place)
        batch = count(data["batch"], f"{place}.batch")
        if batch >= len(batches):
            raise CheckpointError(f"{place}.batch is {batch} of {len(batches)}; the file is damaged")
        steps.append(
            StepItem(
                batch=batches[batch],
                played=None,
                iteration=count(data["iteration"], f"{place}.iteration"),
                seconds=reader.read(dict[str, float], data["seconds"], f"{place}.seconds"),
                metrics=reader.read(dict[str, float], data["metrics"], f"{place}.metrics"),
            )
        )
    return steps


# -- groups


def _write_groups(rounds: RoundsState, groups: Unconsumed, folder: Path) -> State:
    """Write the groups; returns the tasks' position, where the tasks of groups that JSON cannot hold are drawn again.

    Their tasks are not written, but what draws them: a dataset's row may hold anything.
    """
    writer = RecordWriter()
    kept = replace(
        groups,
        waiting=tuple(
            replace(one, group=_with_plain_extras(one.group)) for one in groups.waiting if _is_plain(one.group)
        ),
        dropped=tuple(map(_as_counted, groups.dropped)),
        filtered=tuple(map(_as_counted, groups.filtered)),
        stale=tuple(map(_as_counted, groups.stale)),
    )
    data = writer.write(Unconsumed, kept)
    draws = [rounds.draws[task.position] for task in writer.tasks]
    identities = [[task.key, task.group_id] for task in writer.tasks]
    _write_records(folder, GROUPS, {"groups": data, "draws": draws, "identities": identities}, writer.tensors())
    lost = {one.group.task.position for one in groups.waiting} - {one.group.task.position for one in kept.waiting}
    return rounds.drawn_again(sorted(lost))


def _read_groups(folder: Path, position: State, tasks: TaskStream) -> RoundsState:
    body, tensors = _read_records(folder, GROUPS)
    where = f"{folder / GROUPS}.json"
    check_keys(body, ("groups", "draws", "identities"), where)
    draws: list[State] = [
        expect(state, dict, f"{where}: draws[{number}]")
        for number, state in enumerate(expect(body["draws"], list, f"{where}: draws"))
    ]
    drawn = tasks.redraw(draws)
    if [[task.key, task.group_id] for task in drawn] != body["identities"]:
        raise CheckpointError(
            f"the groups of {where} were played for other tasks than this run draws; resume with the same seed, "
            "environments and dataset"
        )
    unconsumed = RecordReader(tensors, drawn).read(Unconsumed, body["groups"], f"{where}: groups")
    states = {task.position: state for task, state in zip(drawn, draws, strict=True)}
    return RoundsState(tasks=position, unconsumed=unconsumed, draws=states)


def _is_plain(group: Group) -> bool:
    """Whether JSON can hold the group as it is."""
    try:
        RecordWriter().write(Group, _with_plain_extras(group))
    except (NotPlain, RecursionError):  # arguments that a model wrote may be nested deeply
        return False
    return True


def _as_counted(group: Group) -> Group:
    """A group that is not trained: where JSON cannot hold its episodes, what is left are its failures."""
    return _with_plain_extras(group) if _is_plain(group) else replace(group, episodes=())


def _with_plain_extras(group: Group) -> Group:
    """What reward functions logged goes to the episode log only: what JSON cannot hold is shown as text there."""
    return replace(group, episodes=tuple(_shown(episode) for episode in group.episodes))


def _shown(episode: Episode) -> Episode:
    extras = {}
    for name, value in episode.extras.items():
        try:
            extras[name] = plain(value)
        except (NotPlain, RecursionError):
            extras[name] = str(value)
    return replace(episode, extras=extras)


# -- files


def _write_json(path: Path, kind: str, body: Mapping[str, Any]) -> None:
    text = json.dumps({"envgrad": kind, "schema": SCHEMA, **body})
    path.write_text(text, encoding="utf-8")


def _read_json(path: Path, kind: str) -> dict[str, Any]:
    """
    Raises:
        CheckpointError: there is no such file, or another one.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, and {STATE_NAME} names it: the checkpoint is not whole") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}): it is torn; resume from another checkpoint"
        ) from error
    if not isinstance(data, dict) or data.get("envgrad") != kind:
        raise CheckpointError(
            f"{path} is no file of envgrad's with a checkpoint's {kind}; resume from another checkpoint"
        )
    if data.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} is of version {data.get('schema')!r}, and this envgrad reads {SCHEMA}; resume with the version "
            "that wrote it"
        )
    return {key: value for key, value in data.items() if key not in ("envgrad", "schema")}


def _write_records(folder: Path, stem: str, body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    path = folder / f"{stem}.safetensors"
    save_file(dict(tensors), path)
    _write_json(folder / f"{stem}.json", stem, {"tensors": _mark(path), "records": body})


def _read_records(folder: Path, stem: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    data = _read_json(folder / f"{stem}.json", stem)
    check_keys(data, ("tensors", "records"), f"{folder / stem}.json")
    path = folder / f"{stem}.safetensors"
    if not path.exists():
        raise CheckpointError(f"{path} is missing, and {stem}.json names it: the checkpoint is not whole")
    if _mark(path) != data["tensors"]:
        raise CheckpointError(
            f"{path} is not the file that {stem}.json was written with: one of them is torn or foreign; resume from "
            "another checkpoint"
        )
    return expect(data["records"], dict, f"{folder / stem}.json: records"), read_tensors(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file of a checkpoint, on the CPU.

    Raises:
        CheckpointError: it is missing, torn, or no such file.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}): it is torn or foreign; resume from another checkpoint"
        ) from error
    return tensors


def _mark(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
