"""The task stream: every draw's identity, and the position that a checkpoint keeps.

::

    EnvironmentTasks   one environment draws its own tasks   --.
    MixtureTasks       several of them, mixed by weight      --|
    CurriculumTasks    the same, weights move with results   --+-> Draw -> TaskStream -> Task
    DatasetTasks       the rows of a dataset feed reset      --|
    StreamingTasks     the same, from a stream               --'

    group_id = hash63(seed, split, environment, position)      task.seed = hash63("seed", group_id)

So tasks depend on the run's seed and their position only, never on the clock or on how many are taken at once; a
training and an evaluation stream never share an id, since the split is hashed too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgrad.environments.curriculum import CurriculumOptions, CurriculumTasks
from envgrad.environments.dataset_tasks import Dataset, DatasetTasks, StreamingTasks, dataset_tasks
from envgrad.environments.sources import (
    Draw,
    EnvironmentTasks,
    MixtureTasks,
    State,
    TaskSource,
    check_same,
    hash63,
    read_count,
    read_mapping,
)
from envgrad.errors import ConfigurationError
from envgrad.types import Group, Task

if TYPE_CHECKING:
    from envgrad.environments.spec import EnvironmentSpec

__all__ = [
    "CurriculumOptions",
    "CurriculumTasks",
    "DatasetTasks",
    "Draw",
    "EnvironmentTasks",
    "MixtureTasks",
    "StreamingTasks",
    "TaskSource",
    "TaskStream",
    "build_task_stream",
    "hash63",
]


class TaskStream:
    """Numbers a source's draws and gives each its identity. One caller draws: taking is not thread-safe.

    A task that replaces a dropped one is simply the next draw.

    Example:
        >>> rows = [{"prompt": "1+1?"}, {"prompt": "2+2?"}]
        >>> stream = build_task_stream({}, seed=0, split="train", dataset=rows, shuffle=False)
        >>> [(task.key, task.epoch, task.row["prompt"]) for task in stream.take(3)]
        [('train/0', 0, '1+1?'), ('train/1', 0, '2+2?'), ('train/2', 1, '1+1?')]
        >>> other = build_task_stream({}, seed=0, split="train", dataset=rows, shuffle=False)
        >>> other.load_state_dict(stream.state_dict())
        >>> other.take(2) == stream.take(2)
        True
    """

    def __init__(self, source: TaskSource, *, seed: int, split: str) -> None:
        self._source = source
        self._seed = seed
        self._split = split
        self._position = 0
        self._returned: deque[tuple[Task, State]] = deque()

    @property
    def position(self) -> int:
        """How many tasks have been drawn; those that a checkpoint gave back count again when they are."""
        return self._position - len(self._returned)

    @property
    def epoch_length(self) -> int | None:
        """Draws in one pass over finite data; None if the data is endless or its length is unknown (streaming)."""
        return self._source.epoch_length

    @property
    def passes(self) -> float:
        """Passes over finite data so far, counted in draws; 0 for endless data."""
        length = self.epoch_length
        return self._source.passes - (len(self._returned) / length if length else 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """The shares that a curriculum gives to the environments now; empty without one."""
        return self._source.curriculum.shares if isinstance(self._source, CurriculumTasks) else {}

    def observe(self, groups: Sequence[Group]) -> None:
        """Tell what came of tasks of this stream: a curriculum sets its shares by it. Without one nothing happens.

        Deterministic given the order of ``groups``; call it between takes, at points that do not depend on the clock.
        """
        if isinstance(self._source, CurriculumTasks):
            self._source.curriculum.observe(groups)

    def take(self, n: int) -> list[Task]:
        """The next ``n`` tasks. A take may cross an epoch's end.

        Raises:
            ConfigurationError: a negative ``n``; a row that cannot be used.
            KeyError: a row without ``prompt`` where there is no environment.
        """
        if n < 0:
            raise ConfigurationError(f"take({n}): the number of tasks must be at least 0")
        return [self._returned.popleft()[0] if self._returned else self._next() for _ in range(n)]

    def draw(self) -> tuple[Task, State]:
        """The next task, and what ``state_dict`` takes to have it drawn again."""
        if self._returned:
            return self._returned.popleft()
        state = self._own_state()
        return self._next(), state

    def _next(self) -> Task:
        draw = self._source.draw()
        group_id = hash63(self._seed, self._split, draw.environment, self._position)
        task = Task(
            position=self._position,
            split=self._split,
            environment=draw.environment,
            group_id=group_id,
            seed=hash63("seed", group_id),
            task_index=draw.task_index,
            epoch=draw.epoch,
            row=draw.row,
        )
        self._position += 1
        return task

    def state_dict(self, again: Sequence[State] = ()) -> State:
        """JSON-able: the run's seed and split (for checking), the position, and the source's counters.

        Args:
            again: States from ``draw`` of tasks that were drawn and came to nothing yet: they are drawn again first.
        """
        returned = [*again, *(state for _, state in self._returned)]
        return self._own_state() | ({"again": returned} if returned else {})

    def _own_state(self) -> State:
        return {
            "seed": self._seed,
            "split": self._split,
            "position": self._position,
            "source": {"kind": type(self._source).__name__, **self._source.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue exactly behind ``state``.

        Raises:
            ConfigurationError: the state is of a stream with another seed, split, kind of data or size; the order
                would differ from the uninterrupted run's.
        """
        again = state.get("again", [])
        if not isinstance(again, list):
            raise ConfigurationError(f"the state's 'again' is {again!r}; it must be a list of states")
        returned = [self._drawn_at(one) for one in again]
        self._load(state)
        self._returned = deque(returned)

    def redraw(self, states: Sequence[State]) -> list[Task]:
        """The tasks of states from ``draw``. The stream is left behind the last: load a state before it is used.

        Raises:
            ConfigurationError: as ``load_state_dict``.
        """
        return [self._drawn_at(state)[0] for state in states]

    def _drawn_at(self, state: State) -> tuple[Task, State]:
        self._load(state)
        return self._next(), state

    def _load(self, state: Mapping[str, object]) -> None:
        source = read_mapping(state, "source")
        check_same(state, "seed", self._seed, "the run's seed")
        check_same(state, "split", self._split, "the split")
        check_same(source, "kind", type(self._source).__name__, "the kind of task source")
        position = read_count(state, "position")
        self._source.load_state_dict(source)
        self._position = position


def build_task_stream(
    specs: Mapping[str, EnvironmentSpec],
    *,
    seed: int,
    split: str,
    dataset: Dataset | None = None,
    weights: Mapping[str, float] | None = None,
    shuffle: bool = True,
    routed: bool | None = None,
    curriculum: CurriculumOptions | None = None,
) -> TaskStream:
    """The task stream of a run: a dataset's rows if there is one, else what the environments own.

    Args:
        specs: the environments by name; empty if a dataset alone gives the prompts.
        dataset: rows by index, or a stream of rows.
        weights: shares of several environments that own their tasks; equal if None.
        shuffle: of finite data, anew for each epoch. Streaming data keeps its own order.
        routed: whether the rows' ``environment`` column names their environment. None: if there are several.
        curriculum: lets the shares of several environments follow their results (``observe``).

    Raises:
        ConfigurationError: neither environment nor dataset; weights for unknown names, missing, not positive, or beside
            a dataset; a curriculum beside a dataset or for one environment; a dataset that does not fit
            (``dataset_tasks``).
        KeyError: a dataset without ``prompt`` and no environment.

    Example:
        >>> from envgrad.environments.contract import inspect_environment
        >>> class Echo:
        ...     def reset(self, seed): return f"Say {seed % 3}."
        >>> spec, _ = inspect_environment("echo", Echo)
        >>> [task.key for task in build_task_stream({"echo": spec}, seed=0, split="eval").take(2)]
        ['eval/0', 'eval/1']
    """
    for name, spec in specs.items():
        if name != spec.name:
            raise ConfigurationError(f"environment {name!r} was inspected under the name {spec.name!r}; use one name")
    if dataset is None and not specs:
        raise ConfigurationError(
            "there is neither a dataset nor an environment, so there are no tasks; give train_dataset, "
            "environment_factory, or both"
        )
    if weights is not None:
        _check_weights(weights, specs, dataset)
    if curriculum is not None:
        _check_curriculum(specs, dataset)
    environments = list(specs.values())
    shares = [1.0 if weights is None else weights[name] for name in specs]
    source: TaskSource
    if dataset is not None:
        routed = len(specs) > 1 if routed is None else routed
        source = dataset_tasks(dataset, environments, routed=routed, seed=seed, split=split, shuffle=shuffle)
    elif len(environments) == 1:
        source = EnvironmentTasks(environments[0], seed=seed, split=split, shuffle=shuffle)
    elif curriculum is not None:
        source = CurriculumTasks(environments, shares, curriculum, seed=seed, split=split, shuffle=shuffle)
    else:
        source = MixtureTasks(environments, shares, seed=seed, split=split, shuffle=shuffle)
    return TaskStream(source, seed=seed, split=split)


def _check_weights(weights: Mapping[str, float], specs: Mapping[str, EnvironmentSpec], dataset: object) -> None:
    if dataset is not None:
        raise ConfigurationError(
            f"environment_weights={dict(weights)!r} beside a dataset: the rows' environment column decides how often "
            "each environment is used; leave the weights out"
        )
    known = ", ".join(specs)
    for name in weights:
        if name not in specs:
            raise ConfigurationError(f"environment_weights names {name!r}, which is none of the environments ({known})")
    for name in specs:
        if name not in weights:
            raise ConfigurationError(
                f"environment_weights has no weight for {name!r}; give one for each environment ({known})"
            )


def _check_curriculum(specs: Mapping[str, EnvironmentSpec], dataset: object) -> None:
    if dataset is not None:
        raise ConfigurationError(
            "a curriculum beside a dataset cannot act: the rows' environment column decides how often each environment "
            "is used; leave the curriculum out"
        )
    if len(specs) < 2:
        raise ConfigurationError(
            f"a curriculum moves weight between environments, and there is only {', '.join(specs)}; give several as "
            "environment_factory={name: class}, or leave the curriculum out"
        )
