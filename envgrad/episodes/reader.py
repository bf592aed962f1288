"""Reads a run's episode log, also while the run writes it: what is new is seen as soon as its round was written.

::

    with EpisodeReader("runs/first") as reader:
        best = reader.rows(EpisodeFilter(min_reward=1.0), order="-reward", limit=10)
        whole = reader.episode(best[0].number)
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envgrad.episodes.index import INDEX_NAME, LIGHT, EpisodeIndex, add_missing, is_sound, read_parts, select_open
from envgrad.episodes.parts import TOKEN_COLUMNS, FlatRow, Part, part_facts, part_files, read_rows, unpacked
from envgrad.episodes.queries import order_clause, where_clause
from envgrad.episodes.records import (
    EpisodeFilter,
    EpisodeRecord,
    EpisodeSummary,
    News,
    Order,
    Preview,
    StepSummary,
    Use,
)
from envgrad.episodes.whole import read_record
from envgrad.errors import ConfigurationError

ALL = EpisodeFilter()
_SELECT = "SELECT " + ", ".join(f'"{name}"' for name in LIGHT) + " FROM episodes"


class EpisodeReader:
    """A run's episodes. May be used from several threads, one query at a time. ``with`` closes it.

    An index that is gone or broken is made again in memory; episodes whose part is gone or broken are left out.

    Args:
        run: A run's ``output_dir``, or its ``episodes`` folder.

    Raises:
        ConfigurationError: the folder holds no episode log.
    """

    def __init__(self, run: str | Path) -> None:
        self.folder = _log_folder(Path(run))
        self._lock = threading.RLock()
        self._connection = self._connect()
        self._resets = -1
        self._broken = ""
        self._look_for_broken_parts()

    def rows(
        self, filter: EpisodeFilter = ALL, *, order: Order = "newest", limit: int | None = 100, offset: int = 0
    ) -> list[EpisodeSummary]:
        """The episodes that ``filter`` lets through.

        Raises:
            ConfigurationError: an unknown order.
        """
        where, values = where_clause(filter)
        chosen = f"WHERE {where}{self._broken} ORDER BY {order_clause(order)}"
        if limit is None:
            return [_summary(row) for row in self._query(f"{_SELECT} {chosen} LIMIT -1 OFFSET ?", [*values, offset])]
        # First their numbers, which an index holds: of what is left out no line is read.
        inner = f"SELECT number FROM episodes {chosen} LIMIT ? OFFSET ?"
        text = f"{_SELECT} WHERE number IN ({inner}) ORDER BY {order_clause(order)}"
        return [_summary(row) for row in self._query(text, [*values, limit, offset])]

    def count(self, filter: EpisodeFilter = ALL) -> int:
        """How many episodes ``filter`` lets through."""
        where, values = where_clause(filter)
        return int(self._query(f"SELECT count(*) FROM episodes WHERE {where}{self._broken}", values)[0][0])

    def group(self, group: int) -> list[EpisodeSummary]:
        """The siblings of one group (``EpisodeSummary.group``), in sibling order; failed ones too."""
        found = self._query(f'{_SELECT} WHERE "group" = ?{self._broken} ORDER BY sibling, number', [group])
        return [_summary(row) for row in found]

    def groups(self, step: int, split: str = "train") -> list[list[EpisodeSummary]]:
        """The groups logged at ``step``, in task order, each as ``group`` has it."""
        found = self._query(
            f'{_SELECT} WHERE current = 1 AND step = ? AND split = ?{self._broken} ORDER BY "group", sibling, number',
            [step, split],
        )
        groups: dict[int, list[EpisodeSummary]] = defaultdict(list)
        for row in found:
            summary = _summary(row)
            groups[summary.group].append(summary)
        return list(groups.values())

    def summary(self, number: int) -> EpisodeSummary:
        """One episode's line.

        Raises:
            ConfigurationError: there is none with this number.
        """
        found = self._query(f"{_SELECT} WHERE number = ?", [number])
        if not found:
            raise ConfigurationError(self._no_episode(number))
        return _summary(found[0])

    def find(self, split: str, position: int, sibling: int) -> EpisodeSummary | None:
        """The latest episode of a task's sibling, of the present lineage."""
        found = self._query(
            f"{_SELECT} WHERE current = 1 AND split = ? AND position = ? AND sibling = ? AND part = ''{self._broken} "
            "ORDER BY number DESC LIMIT 1",
            [split, position, sibling],
        )
        return _summary(found[0]) if found else None

    def episode(self, number: int) -> EpisodeRecord:
        """One episode whole.

        Raises:
            ConfigurationError: there is none with this number, or its part is gone or broken.
        """
        summary = self.summary(number)
        return read_record(next(self._flat([number])), summary)

    def episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeRecord]:
        """Several, in ascending order of their numbers, each part read once: for exports. Raises as ``episode``."""
        wanted = sorted(set(numbers))
        for begin in range(0, len(wanted), 500):
            some = wanted[begin : begin + 500]
            marks = ", ".join("?" for _ in some)
            found = self._query(f"{_SELECT} WHERE number IN ({marks}) ORDER BY number", some)
            summaries = [_summary(row) for row in found]
            missing = set(some) - {summary.number for summary in summaries}
            if missing:
                raise ConfigurationError(self._no_episode(min(missing)))
            for summary, flat in zip(summaries, self._flat(some), strict=True):
                yield read_record(flat, summary)

    def previews(self, numbers: Sequence[int], length: int = 200) -> dict[int, Preview]:
        """The first ``length`` characters of prompt and answer, by number; from the index alone."""
        marks = ", ".join("?" for _ in numbers)
        found = self._query(
            "SELECT rowid, substr(prompt, 1, ?), substr(CASE answers WHEN '' THEN results ELSE answers END, 1, ?) "
            f"FROM words WHERE rowid IN ({marks})",
            [length, length, *numbers],
        )
        return {number: Preview(prompt=prompt, answer=answer) for number, prompt, answer in found}

    def steps(self) -> list[StepSummary]:
        """Every step with a log or episodes, in order: the present lineage. Stays whole when old parts are dropped."""
        metrics: dict[int, dict[str, float]] = defaultdict(dict)
        means: dict[str, dict[int, dict[str, float]]] = {"train": defaultdict(dict), "eval": defaultdict(dict)}
        counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        with self._lock:
            for step, name, value in self._query("SELECT step, name, value FROM step_metrics ORDER BY step"):
                metrics[step][name] = float("nan") if value is None else value
            sums = self._query("SELECT step, split, environment, episodes, failed, scored, total FROM step_rewards")
        for step, split, environment, episodes, failed, scored, total in sums:
            kind = "eval" if split == "eval" else "train"
            counts[step][kind == "eval"] += episodes
            counts[step][2] += failed
            if scored:
                means[kind][step][environment] = total / scored
        return [
            StepSummary(
                step=step,
                metrics=metrics.get(step, {}),
                rewards=means["train"].get(step, {}),
                eval_rewards=means["eval"].get(step, {}),
                episodes=counts[step][0],
                eval_episodes=counts[step][1],
                failed=counts[step][2],
            )
            for step in sorted({*metrics, *counts})
        ]

    def environments(self) -> list[str]:
        """Names of environments, as ``EpisodeFilter.environment`` takes them."""
        return self._distinct("environment")

    def splits(self) -> list[str]:
        """``train``, ``eval``, or both."""
        return self._distinct("split")

    def stop_reasons(self) -> list[str]:
        """The reasons for which episodes ended here."""
        return self._distinct("stop_reason")

    def failure_kinds(self) -> list[str]:
        """The kinds of failures that there were."""
        return self._distinct("failed")

    def reward_components(self) -> list[str]:
        """Names of ``EpisodeSummary.rewards``: of the latest thousand episodes."""
        latest = self.rows(EpisodeFilter(failed=False), limit=1000)
        return sorted({name for row in latest for name in row.rewards})

    def follow(self, since: str | None = None) -> News:
        """What is new since the cursor of an earlier call; cheap enough to be asked every second."""
        changes, resets, last, step = self._query(
            "SELECT (SELECT value FROM facts WHERE name = 'changes'), (SELECT value FROM facts WHERE name = 'resets'), "
            "(SELECT max(number) FROM episodes), "
            "max(ifnull((SELECT max(step) FROM step_metrics), -1), ifnull((SELECT max(step) FROM step_rewards), -1))"
        )[0]
        last = -1 if last is None else last
        before = [int(word) for word in since.split(".")] if since else [-1, resets, -1]
        if resets != self._resets:
            self._look_for_broken_parts()
        return News(
            cursor=f"{changes}.{resets}.{last}",
            changed=[changes, resets, last] != before,
            episodes=max(0, last - before[2]),
            last_step=step,
            reset=resets != before[1] or last < before[2],
        )

    def run(self) -> dict[str, Any]:
        """What the run's record says of how it was made; empty without one."""
        try:
            found = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def dropped_episodes(self) -> int:
        """How many old episodes were dropped to keep the log within its limit."""
        return int(self._query("SELECT value FROM facts WHERE name = 'dropped'")[0][0])

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> EpisodeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _query(self, text: str, values: Sequence[object] = ()) -> list[Any]:
        with self._lock:
            return self._connection.execute(text, values).fetchall()

    def _distinct(self, column: str) -> list[str]:
        found = self._query(f"SELECT DISTINCT {column} FROM episodes WHERE {column} IS NOT NULL ORDER BY 1")
        return [row[0] for row in found]

    def _connect(self) -> sqlite3.Connection:
        path = self.folder / INDEX_NAME
        # The second for a folder that cannot be written, where no run is running.
        for more in ("", "&immutable=1") if path.is_file() else ():
            connection = sqlite3.connect(f"file:{_quoted(path)}?mode=ro{more}", uri=True, check_same_thread=False)
            if is_sound(connection):
                connection.execute("PRAGMA cache_size = -16000")
                return connection
            connection.close()
        index = EpisodeIndex(":memory:")
        add_missing(index, self.folder)
        return index.connection

    def _look_for_broken_parts(self) -> None:
        """A condition that leaves out the episodes of parts which are not as the index has them."""
        with self._lock:
            self._resets = int(self._query("SELECT value FROM facts WHERE name = 'resets'")[0][0])
            broken = [part for part in read_parts(self._connection) if not self._is_sound(part)]
        self._broken = "".join(f" AND number NOT BETWEEN {part.first} AND {part.last}" for part in broken)

    def _is_sound(self, part: Part) -> bool:
        path = self.folder / part.name
        return path.is_file() and (path.stat().st_size == part.size or part_facts(path) is not None)

    def _flat(self, numbers: Sequence[int]) -> Iterator[FlatRow]:
        """Rows of ascending ``numbers``: from their parts, or of the latest ones from the index."""
        left = list(numbers)
        while left:
            # First the index: what was moved to a part meanwhile is then found there.
            with self._lock:
                found = select_open(self._connection, "number = ?", [left[0]])
            if found:
                yield found[0] | {name: unpacked(name, found[0][name]) for name in TOKEN_COLUMNS}
                left = left[1:]
                continue
            part = self._part_of(left[0])
            here = [number for number in left if number <= part.last]
            yield from self._read(part, here)
            left = left[len(here) :]

    def _read(self, part: Part, numbers: Sequence[int]) -> Iterator[FlatRow]:
        import pyarrow as pa

        path = self.folder / part.name
        try:
            yield from read_rows(path, [number - part.first for number in numbers])
        except (OSError, pa.ArrowException) as error:
            what = "is gone" if isinstance(error, FileNotFoundError) else f"is broken ({error})"
            raise ConfigurationError(f"{path} {what}, and episode {numbers[0]} with it") from error

    def _part_of(self, number: int) -> Part:
        with self._lock:
            parts = read_parts(self._connection)
        for part in parts:
            if part.first <= number <= part.last:
                return part
        raise ConfigurationError(self._no_episode(number))

    def _no_episode(self, number: int) -> str:
        first, last = self._query("SELECT min(number), max(number) FROM episodes")[0]
        if first is None:
            return f"{self.folder} holds no episode {number}: it is empty"
        why = f"; {self.dropped_episodes()} older ones were dropped for room (episode_log_gb)" if number < first else ""
        return f"{self.folder} holds no episode {number}: its episodes are {first} to {last}{why}"


def _log_folder(run: Path) -> Path:
    for folder in (run / "episodes", run):
        if (folder / INDEX_NAME).is_file() or part_files(folder):
            return folder
    raise ConfigurationError(
        f"{run} holds no episode log; give the output_dir of a run with log_episodes=True (which is the default)"
    )


def _quoted(path: Path) -> str:
    from urllib.parse import quote

    return quote(str(path.absolute()))


def _summary(row: Sequence[Any]) -> EpisodeSummary:
    values = dict(zip(LIGHT, row, strict=True))
    values["rewards"] = json.loads(values["rewards"])
    values["use"] = Use(values["use"])
    values["truncated"] = bool(values["truncated"])
    values["current"] = bool(values["current"])
    return EpisodeSummary(**values)
