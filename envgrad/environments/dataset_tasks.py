"""Tasks from a dataset: its rows feed ``reset``, its length drives epochs.

Checked at construction, whole where the dataset can be indexed: the columns, and every row's environment where rows are
routed (only the routing column is read). A streaming dataset (an iterable without length) is checked row by row, before
anything is sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from envgrad.environments.results import row_messages
from envgrad.environments.sources import Draw, EpochOrder, Row, State, check_same, read_count
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.environments.spec import EnvironmentSpec

IDENTITY_NAMES = ("group_id", "seed", "task_index", "split")
"""What ``reset`` can ask for besides the row's columns."""

ROUTE = "environment"
"""The column that names a row's environment."""


@runtime_checkable
class MapDataset(Protocol):
    """Rows by index: a ``datasets.Dataset``, a list of dicts, ..."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


@runtime_checkable
class ColumnDataset(Protocol):
    """A dataset that knows its columns and can leave out the others without reading them, as ``datasets`` does."""

    @property
    def column_names(self) -> list[str] | None: ...

    def select_columns(self, column_names: list[str]) -> Iterable[Row]: ...


Dataset: TypeAlias = MapDataset | Iterable[Row]


@dataclass(frozen=True, slots=True)
class RowRules:
    """What every row must hold, given the environments that rows feed."""

    environments: tuple[str, ...]
    routed: bool
    """whether the ``environment`` column says which environment a row is for"""
    taken: frozenset[str]
    """names that a ``reset`` gets from the task itself, so no column may have them"""

    @classmethod
    def of(cls, specs: Sequence[EnvironmentSpec], routed: bool) -> RowRules:
        taken = {name for spec in specs for name in IDENTITY_NAMES if spec.reset_takes_all or name in spec.reset_names}
        return cls(environments=tuple(spec.name for spec in specs), routed=routed, taken=frozenset(taken))

    def check_columns(self, columns: Collection[str], where: str) -> None:
        """
        Raises:
            KeyError: there is no environment and no ``prompt``.
            ConfigurationError: rows are routed and there is no ``environment``, or a column has a name that ``reset``
                gets from the task.
        """
        if not self.environments and "prompt" not in columns:
            raise KeyError(
                f"prompt: {where} has no column 'prompt', only {sorted(columns)}; "
                "add it, or give an environment_factory whose reset makes the prompt"
            )
        if self.routed and ROUTE not in columns:
            raise ConfigurationError(
                f"{where} has no column {ROUTE!r}, only {sorted(columns)}; with several environments it must name one "
                f"of {', '.join(self.environments)} for each row"
            )
        for name in sorted(self.taken.intersection(columns)):
            raise ConfigurationError(
                f"{where} has a column {name!r}, but reset gets {name!r} from the task itself; rename the column"
            )

    def environment_of(self, row: Row, number: int) -> str:
        """The name of the environment that row ``number`` is for; empty if there is none."""
        if not self.routed:
            return self.environments[0] if self.environments else ""
        name = row[ROUTE]
        if name not in self.environments:
            raise ConfigurationError(
                f"row {number} of the dataset has {ROUTE}={name!r}, which is none of the environments; "
                f"use one of {', '.join(self.environments)}"
            )
        return str(name)

    def check_prompt(self, row: Row, number: int) -> None:
        """
        Raises:
            KeyError: there is no environment, and the row's ``prompt`` is None or an empty chat.
            EnvironmentContractError: there is no environment, and it is neither text nor messages of text.
        """
        if self.environments:
            return
        prompt, where = row["prompt"], f"row {number} of the dataset"
        if not row_messages(prompt, f"{where}: its prompt"):
            raise KeyError(f"prompt: {where} has prompt={prompt}, and there is no environment that makes one")

    def draw(self, row: Row, number: int, epoch: int) -> Draw:
        """Row ``number`` as a draw, checked once more: rows need not have the columns that the first one has."""
        if not isinstance(row, Mapping):
            raise ConfigurationError(f"row {number} of the dataset is a {type(row).__name__}; it must be a dict")
        self.check_columns(row, f"row {number} of the dataset")
        self.check_prompt(row, number)
        return Draw(environment=self.environment_of(row, number), task_index=number, epoch=epoch, row=dict(row))


class DatasetTasks:
    """Tasks from a dataset whose rows can be indexed, each once per epoch, shuffled anew for each epoch from ``seed``.

    ``task_index`` is the row's index.

    Raises:
        ConfigurationError: an empty dataset, a row with an unknown environment, a column whose name is taken.
        KeyError: no ``prompt`` column and no environment.

    Example:
        >>> rows = [{"prompt": "1+1?"}, {"prompt": "2+2?"}]
        >>> tasks = DatasetTasks(rows, RowRules.of([], False), seed=0, split="train")
        >>> sorted(tasks.draw().row["prompt"] for _ in range(2)), tasks.passes
        (['1+1?', '2+2?'], 1.0)
    """

    def __init__(self, dataset: MapDataset, rules: RowRules, *, seed: int, split: str, shuffle: bool = True) -> None:
        if len(dataset) == 0:
            raise ConfigurationError(
                "the dataset has no rows; give at least one, or no dataset (environments own tasks)"
            )
        self._dataset = dataset
        self._rules = rules
        self._order = EpochOrder(len(dataset), (seed, split, "dataset") if shuffle else None)
        self._drawn = 0
        columns = _column_names(dataset)
        first = _row_at(dataset, 0) if columns is None or not rules.environments else {}
        rules.check_columns(first if columns is None else columns, "the dataset")
        rules.check_prompt(first, 0)
        if rules.routed:
            for number, row in enumerate(_routing_rows(dataset)):
                rules.check_columns(row if columns is None else columns, f"row {number} of the dataset")
                rules.environment_of(row, number)

    @property
    def epoch_length(self) -> int:
        return self._order.length

    @property
    def passes(self) -> float:
        return self._drawn / self._order.length

    def draw(self) -> Draw:
        epoch, index = self._order.at(self._drawn)
        self._drawn += 1
        return self._rules.draw(self._dataset[index], index, epoch)

    def state_dict(self) -> State:
        return {"drawn": self._drawn, "length": self._order.length}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        check_same(state, "length", self._order.length, "the dataset's number of rows")
        self._drawn = read_count(state, "drawn")


class StreamingTasks:
    """Tasks from an iterable without length, in its own order (shuffle the dataset itself if it can).

    ``task_index`` is the row's number in its pass. At its end the dataset is iterated again. The state is the position:
    resuming reads and drops the rows before it.

    Raises:
        ConfigurationError: the dataset has no rows, or ends and gives none when iterated again; a bad row, when drawn.
        KeyError: no ``prompt`` and no environment; at construction where the columns are known, else when drawn.

    Example:
        >>> def rows():
        ...     yield {"prompt": "1+1?"}
        >>> tasks = StreamingTasks(rows(), RowRules.of([], False))
        >>> tasks.draw().row
        {'prompt': '1+1?'}
    """

    def __init__(self, dataset: Iterable[Row], rules: RowRules) -> None:
        self._dataset = dataset
        self._rules = rules
        self._rows: Iterator[Row] | None = None
        self._epoch = 0
        self._in_epoch = 0
        self._rows_per_epoch: int | None = None
        columns = _column_names(dataset)
        if columns is not None:
            rules.check_columns(columns, "the dataset")

    @property
    def epoch_length(self) -> None:
        """Unknown: a stream cannot say how long it is."""
        return None

    @property
    def passes(self) -> float:
        """Finished passes, and from the second on the part of the current one (the length is known by then)."""
        return self._epoch + (self._in_epoch / self._rows_per_epoch if self._rows_per_epoch else 0.0)

    def draw(self) -> Draw:
        if self._rows is None:
            self._rows = iter(self._dataset)
        following = list(islice(self._rows, 1)) or [self._next_pass()]
        number = self._in_epoch
        self._in_epoch += 1
        return self._rules.draw(following[0], number, self._epoch)

    def _next_pass(self) -> Row:
        if self._in_epoch == 0:
            raise ConfigurationError("the streaming dataset has no rows; give a dataset with at least one")
        self._rows = iter(self._dataset)
        following = list(islice(self._rows, 1))
        if not following:
            raise ConfigurationError(
                f"the streaming dataset ended after {self._in_epoch} rows and gives none when iterated again; "
                "give an object whose __iter__ starts anew (no generator), or fewer max_steps"
            )
        self._rows_per_epoch, self._in_epoch = self._in_epoch, 0
        self._epoch += 1
        return following[0]

    def state_dict(self) -> State:
        return {"epoch": self._epoch, "in_epoch": self._in_epoch, "rows_per_epoch": self._rows_per_epoch}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        epoch, in_epoch = read_count(state, "epoch"), read_count(state, "in_epoch")
        rows_per_epoch = read_count(state, "rows_per_epoch") if state["rows_per_epoch"] is not None else None
        rows = iter(self._dataset)
        if rows is self._dataset and self._rows is not None:
            raise ConfigurationError(
                "the streaming dataset is an iterator that has been read from, so no position can be loaded; "
                "load the state before the first draw, or give an object whose __iter__ starts anew"
            )
        skipped = sum(1 for _ in islice(rows, in_epoch))
        if skipped < in_epoch:
            raise ConfigurationError(
                f"the checkpoint stands at row {in_epoch} of the streaming dataset, which now ends after {skipped}; "
                "resume with the same dataset"
            )
        self._rows, self._epoch, self._in_epoch, self._rows_per_epoch = rows, epoch, in_epoch, rows_per_epoch


def dataset_tasks(
    dataset: Dataset, specs: Sequence[EnvironmentSpec], *, routed: bool, seed: int, split: str, shuffle: bool = True
) -> DatasetTasks | StreamingTasks:
    """The source for ``dataset``: by index where it has a length, else streaming.

    Raises:
        ConfigurationError: no dataset at all (a dict of datasets, a string), and what the two sources raise.
    """
    if isinstance(dataset, (Mapping, str, bytes)) or not isinstance(dataset, (MapDataset, Iterable)):
        raise ConfigurationError(
            f"the dataset is a {type(dataset).__name__}; it must be a sequence or an iterable of rows "
            "(of a dict of splits, give one split)"
        )
    rules = RowRules.of(specs, routed)
    if isinstance(dataset, MapDataset):
        return DatasetTasks(dataset, rules, seed=seed, split=split, shuffle=shuffle)
    return StreamingTasks(dataset, rules)


def _column_names(dataset: Dataset) -> list[str] | None:
    return dataset.column_names if isinstance(dataset, ColumnDataset) else None


def _row_at(dataset: MapDataset, index: int) -> Row:
    row = dataset[index]
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"row {index} of the dataset is a {type(row).__name__}; it must be a dict")
    return row


def _routing_rows(dataset: MapDataset) -> Iterator[Row]:
    """The rows, with the routing column alone where the dataset can tell columns apart."""
    if isinstance(dataset, ColumnDataset):
        yield from dataset.select_columns([ROUTE])
    else:
        for index in range(len(dataset)):
            yield _row_at(dataset, index)
