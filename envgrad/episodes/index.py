"""The index of a log: an SQLite file with a line per episode, their words, and the metrics of each step.

Everything but the steps' metrics can be made again from the parts, and is where the file is gone or broken.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from envgrad.episodes.parts import COLUMNS, FORMAT, TOKEN_COLUMNS, FlatRow, Part, part_facts, part_files, read_rows
from envgrad.episodes.whole import words_of

INDEX_NAME = "index.sqlite"
RESUMES_NAME = "resumes.jsonl"
"""a line per resume, ``{"step": ..., "before": ...}``: episodes with a lower number than ``before`` that were logged
beyond ``step`` are not in the lineage of the present weights"""

_HEAVY = ("epoch", "error", "body", "tools", "row", "row_is_exact", "start")
LIGHT = (*(name for name in COLUMNS if name not in _HEAVY), "current")
"""columns of the table ``episodes``"""
HEAVY = ("number", *_HEAVY, *TOKEN_COLUMNS)
"""columns of the table ``open_rows``: what else a part holds, of episodes that are in none yet"""
_TRUTHS = [name for name, kind in COLUMNS.items() if kind == "bool"]
_KINDS = {"string": "TEXT", "float64": "REAL"}


def _table(columns: Sequence[str]) -> str:
    kinds = {name: _KINDS.get(kind, "INTEGER") for name, kind in COLUMNS.items()} | dict.fromkeys(TOKEN_COLUMNS, "BLOB")
    kinds |= {"number": "INTEGER PRIMARY KEY", "current": "INTEGER"}
    return ", ".join(f'"{name}" {kinds[name]}' for name in columns)


_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (name TEXT PRIMARY KEY, first INTEGER, last INTEGER, size INTEGER);
CREATE TABLE IF NOT EXISTS episodes ({_table(LIGHT)});
CREATE INDEX IF NOT EXISTS by_group ON episodes ("group");
CREATE INDEX IF NOT EXISTS by_filter ON episodes
    (current, split, environment, use, stop_reason, truncated, failed, reward, step);
CREATE TABLE IF NOT EXISTS open_rows ({_table(HEAVY)});
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (prompt, answers, results);
CREATE TABLE IF NOT EXISTS step_metrics (step INTEGER, name TEXT, value REAL, PRIMARY KEY (step, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS step_rewards (step INTEGER, split TEXT, environment TEXT, episodes INTEGER, failed INTEGER,
    scored INTEGER, total REAL, PRIMARY KEY (step, split, environment)) WITHOUT ROWID;
"""
_FACTS = ("changes", "resets", "dropped")
"""counters: of writes; of changes that make what was read before wrong; of episodes dropped for room"""


def beyond(step: int) -> tuple[str, tuple[int, int]]:
    """What a resume from the checkpoint of ``step`` leaves behind, as a condition on ``split`` and ``step``.

    A round is logged with the steps made before it, so that training episodes of ``step`` itself are played anew; its
    evaluation came before its checkpoint.
    """
    return "(split = 'eval' AND step > ? OR split != 'eval' AND step >= ?)", (step, step)


class EpisodeIndex:
    """The index as its one writer has it. Each change is one transaction.

    Raises:
        sqlite3.Error: the file cannot be used.
    """

    def __init__(self, path: Path | str) -> None:
        """Open, or make, the file; ``":memory:"`` is one in memory."""
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA cache_size = -4000; "
            "PRAGMA secure_delete = OFF; PRAGMA wal_autocheckpoint = 4000; BEGIN;"
            + _SCHEMA
            + f"INSERT OR IGNORE INTO facts VALUES ('format', {FORMAT});"
            + "".join(f"INSERT OR IGNORE INTO facts VALUES ('{name}', 0);" for name in _FACTS)
            + "COMMIT;"
        )

    @property
    def connection(self) -> sqlite3.Connection:
        return self._connection

    def next_numbers(self) -> tuple[int, int]:
        """The numbers of the next episode and the next group."""
        last, group, parted = self._connection.execute(
            'SELECT (SELECT max(number) FROM episodes), (SELECT max("group") FROM episodes), '
            "(SELECT max(last) FROM parts)"
        ).fetchone()
        number = 1 + max(-1 if value is None else value for value in (last, parted))
        return number, (0 if group is None else group + 1)

    def parts(self) -> list[Part]:
        """In the order of their episodes."""
        return read_parts(self._connection)

    def add(self, rows: Sequence[FlatRow], part: Part | None = None, resumes: Sequence[Mapping[str, int]] = ()) -> None:
        """Episodes with their ``words``; they are in ``part``, or kept here until they are."""
        light = [(*(row[name] for name in LIGHT[:-1]), int(_is_current(row, resumes))) for row in rows]
        words = [(row["number"], *row["words"]) for row in rows]
        with _Transaction(self._connection) as run:
            if part is None:
                heavy = [tuple(row[name] for name in HEAVY) for row in rows]
                run.executemany(f"INSERT INTO open_rows VALUES ({_marks(HEAVY)})", heavy)
            else:
                run.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", (part.name, part.first, part.last, part.size))
            run.executemany(f"INSERT INTO episodes VALUES ({_marks(LIGHT)})", light)
            run.executemany("INSERT INTO words (rowid, prompt, answers, results) VALUES (?, ?, ?, ?)", words)
            run.executemany(
                "INSERT INTO step_rewards VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "episodes = episodes + excluded.episodes, failed = failed + excluded.failed, "
                "scored = scored + excluded.scored, total = total + excluded.total",
                _step_rewards([row for row in rows if _is_current(row, resumes)]),
            )
            _count(run, "changes")

    def num_open(self) -> int:
        """How many episodes are in no part yet."""
        return int(self._connection.execute("SELECT count(*) FROM open_rows").fetchone()[0])

    def open_rows(self) -> list[FlatRow]:
        """Whole rows of the episodes that are in no part yet, as ``write_part`` takes them."""
        return list(select_open(self._connection, "1", ()))

    def move_to(self, part: Part) -> None:
        """The open rows are in ``part`` now."""
        with _Transaction(self._connection) as run:
            run.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", (part.name, part.first, part.last, part.size))
            run.execute("DELETE FROM open_rows WHERE number BETWEEN ? AND ?", (part.first, part.last))

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics logged at ``step``; a later value of the same name replaces an earlier one."""
        with _Transaction(self._connection) as run:
            run.executemany(
                "INSERT OR REPLACE INTO step_metrics VALUES (?, ?, ?)",
                [(step, name, value if isfinite(value) else None) for name, value in metrics.items()],
            )
            _count(run, "changes")

    def drop(self, part: Part) -> None:
        """Forget a part and its episodes; what was summed over its steps stays."""
        with _Transaction(self._connection) as run:
            run.execute("DELETE FROM parts WHERE name = ?", (part.name,))
            for table, column in (("episodes", "number"), ("words", "rowid")):
                run.execute(f"DELETE FROM {table} WHERE {column} BETWEEN ? AND ?", (part.first, part.last))
            _count(run, "dropped", part.episodes)
            _count(run, "resets")

    def leave_behind(self, step: int) -> None:
        """Mark what lies beyond the checkpoint of ``step`` as another lineage's."""
        condition, values = beyond(step)
        with _Transaction(self._connection) as run:
            run.execute(f"UPDATE episodes SET current = 0 WHERE current = 1 AND {condition}", values)
            run.execute(f"DELETE FROM step_rewards WHERE {condition}", values)
            run.execute("DELETE FROM step_metrics WHERE step > ?", (step,))
            _count(run, "resets")

    def has_any(self, first: int, last: int) -> bool:
        """Whether it has an episode with a number from ``first`` to ``last``."""
        found = self._connection.execute("SELECT 1 FROM episodes WHERE number BETWEEN ? AND ? LIMIT 1", (first, last))
        return found.fetchone() is not None

    def close(self) -> None:
        self._connection.close()


class _Transaction:
    """``BEGIN`` and ``COMMIT`` around a block, ``ROLLBACK`` where it raises."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> sqlite3.Connection:
        self._connection.execute("BEGIN IMMEDIATE")
        return self._connection

    def __exit__(self, kind: object, *rest: object) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")


def _count(run: sqlite3.Connection, name: str, more: int = 1) -> None:
    run.execute("UPDATE facts SET value = value + ? WHERE name = ?", (more, name))


def _marks(columns: Sequence[str]) -> str:
    return ", ".join("?" for _ in columns)


def read_parts(connection: sqlite3.Connection) -> list[Part]:
    """The parts that an index knows, in the order of their episodes."""
    rows = connection.execute("SELECT name, first, last, size FROM parts ORDER BY first")
    return [Part(name=name, first=first, last=last, size=size) for name, first, last, size in rows]


def select_open(connection: sqlite3.Connection, condition: str, values: Sequence[object]) -> list[FlatRow]:
    """Rows of episodes that are in no part yet, in order; token columns are ``packed``."""
    names = [*COLUMNS, *TOKEN_COLUMNS]
    columns = ", ".join(f'{"episodes" if name in LIGHT else "open_rows"}."{name}"' for name in names)
    found = connection.execute(
        f"SELECT {columns} FROM open_rows JOIN episodes USING (number) WHERE {condition} ORDER BY number", values
    )
    rows = [dict(zip(names, row, strict=True)) for row in found]
    return [row | {name: bool(row[name]) for name in _TRUTHS} for row in rows]


def _is_current(row: FlatRow, resumes: Sequence[Mapping[str, int]]) -> bool:
    past = row["step"] + (row["split"] != "eval")  # as ``beyond`` has it
    return not any(row["number"] < resume["before"] and past > resume["step"] for resume in resumes)


def _step_rewards(rows: Iterable[FlatRow]) -> list[tuple[Any, ...]]:
    sums: dict[tuple[int, str, str], list[float]] = {}
    for row in rows:
        if row["part"]:  # of a game that is counted by its agent
            continue
        entry = sums.setdefault((row["step"], row["split"], row["environment"]), [0, 0, 0, 0.0])
        entry[0] += 1
        entry[1] += row["failed"] is not None
        # Stale and dropped groups are not in the trainer's reward either.
        if row["reward"] is not None and row["use"] not in ("stale", "dropped"):
            entry[2] += 1
            entry[3] += row["reward"]
    return [(*key, *entry) for key, entry in sums.items()]


def read_resumes(folder: Path) -> list[dict[str, int]]:
    """The resumes of a log, oldest first; a line that was cut off is left out."""
    path = folder / RESUMES_NAME
    resumes = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            resumes.append(json.loads(line))
        except ValueError:
            continue
    return resumes


def add_missing(index: EpisodeIndex, folder: Path) -> list[Path]:
    """Index the parts of ``folder`` that the index does not know; broken ones are left out.

    Those whose episodes it has are returned: their run was killed before it was noted that they are written.
    """
    names = {part.name for part in index.parts()}
    resumes = read_resumes(folder)
    there: list[Path] = []
    for path in part_files(folder):
        facts = None if path.name in names else part_facts(path)
        if facts is None:
            continue
        if index.has_any(facts.first, facts.last):
            there.append(path)
            continue
        rows = [{**row, "words": words_of(row)} for row in read_rows(path, columns=[*LIGHT[:-1], *_HEAVY])]
        index.add(rows, facts, resumes)
    return there


def is_sound(connection: sqlite3.Connection) -> bool:
    """Whether there is an index of this format."""
    try:
        found = connection.execute("SELECT value FROM facts WHERE name = 'format'").fetchone()
        connection.execute("SELECT count(*) FROM parts, episodes, open_rows, words LIMIT 0").fetchone()
    except sqlite3.Error:
        return False
    return bool(found == (FORMAT,))
