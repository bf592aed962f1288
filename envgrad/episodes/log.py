"""Writes a run's episodes, in a thread of its own.

::

    trainer --write(round)--> queue --writer thread--> index.sqlite --as it fills--> part-000042.parquet

Consumes rounds; produces the index, which holds whole episodes until they fill a part. Who writes waits only where
``QUEUE`` rounds are not written yet. What goes wrong in the thread is raised by the next call. A killed run loses at
most the rounds in the queue.
"""

from __future__ import annotations

import fcntl
import json
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from envgrad.episodes.flat import Credit, Flattener
from envgrad.episodes.index import INDEX_NAME, RESUMES_NAME, EpisodeIndex, add_missing, is_sound
from envgrad.episodes.parts import part_files, part_name, serial_of, write_part
from envgrad.episodes.reader import EpisodeReader
from envgrad.episodes.records import EpisodeFilter
from envgrad.episodes.whole import plain_record
from envgrad.errors import ConfigurationError, EpisodeLogError
from envgrad.rollout.runner import Round

logger = logging.getLogger(__name__)

FOLDER_NAME = "episodes"
"""in a run's ``output_dir``"""
LOCK_SECONDS = 5.0
"""for which a folder may still be held by what is left of a killed run"""
QUEUE = 8
"""rounds that may wait to be written"""
PART_EPISODES, PART_BYTES = 512, 4 << 20
"""what fills a part"""


@dataclass(slots=True)
class _Open:
    """What the writer holds while it is open."""

    index: EpisodeIndex
    lock: IO[str]
    thread: ThreadPoolExecutor
    number: int
    group: int
    serial: int
    """of the next part"""
    size: int = 0
    """bytes that wait for it, about"""
    waiting: deque[Future[None]] = field(default_factory=deque)


class EpisodeLog:
    """The log under ``folder``. It opens with the first call that writes and can be closed and opened again.

    Args:
        folder: Where parts and index go.
        limit: Bytes that they may take; beyond it the oldest parts are dropped, which is said once. None: no limit.
        describe: Called when the log opens; what it returns goes to ``run.json``, for replays.
        tokenizer: Called then too; its text goes to ``tokenizer.json``, so that token ids can be shown as text.

    Example:
        >>> import tempfile
        >>> log = EpisodeLog(Path(tempfile.mkdtemp()) / "episodes")
        >>> log.write(Round(groups=()), step=0)
        >>> list(log.read())
        []
        >>> log.close()
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int | None = None,
        describe: Callable[[], Mapping[str, Any]] | None = None,
        tokenizer: Callable[[], str | None] | None = None,
    ) -> None:
        self.folder = folder
        self._limit = limit
        self._describe = describe
        self._tokenizer = tokenizer
        self._open: _Open | None = None
        self._told_of_limit = False

    # -- what the trainer calls

    def write(self, played: Round, *, step: int, credit: Callable[[], Credit] = Credit) -> None:
        """Log a round: ``step`` optimizer steps were made before it. Returns before it is written.

        ``credit`` is called by the writer's thread.

        Raises:
            EpisodeLogError: an earlier write failed, or the log cannot be opened.
        """
        groups = (*played.groups, *played.filtered, *played.stale, *played.dropped)
        if any(group.episodes or group.failures for group in groups):
            self._later(lambda opened: self._write(opened, played, step, credit))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics under ``step``. Raises as ``write`` does."""
        kept = dict(metrics)
        self._later(lambda opened: opened.index.add_metrics(step, kept))

    def begin(self, step: int) -> None:
        """A training begins at ``step``: 0, or that of the checkpoint which is resumed.

        What an earlier one logged beyond it is marked as not current: it stays, and is left out unless asked for.
        Raises as ``write`` does.
        """
        if self._open is not None or (self.folder / INDEX_NAME).exists() or part_files(self.folder):
            self._later(lambda opened: self._begin(opened, step))

    def flush(self) -> None:
        """Wait until all is written. Raises as ``write`` does."""
        if self._open is not None:
            while self._open.waiting:
                self._take(self._open)

    def close(self) -> None:
        """Write what waits, and end the thread. Raises as ``write`` does; it is closed all the same."""
        try:
            if self._open is not None:
                self._later(self._write_part)
            self.flush()
        finally:
            opened, self._open = self._open, None
            if opened is not None:
                opened.thread.shutdown()
                opened.index.close()
                opened.lock.close()

    def read(self, filter: EpisodeFilter | None = None) -> Iterator[dict[str, Any]]:
        """All episodes of the present lineage as plain data, oldest first: ``flat.plain_record``."""
        self.flush()
        if not (self.folder / INDEX_NAME).exists() and not part_files(self.folder):
            return
        with EpisodeReader(self.folder) as reader:
            rows = reader.rows(filter or EpisodeFilter(), order="oldest", limit=None)
            yield from (plain_record(record) for record in reader.episodes([row.number for row in rows]))

    # -- the queue

    def _later(self, job: Callable[[_Open], None]) -> None:
        if self._open is None:
            self._open = self._start()
        opened = self._open
        while opened.waiting and (opened.waiting[0].done() or len(opened.waiting) >= QUEUE):
            self._take(opened)
        opened.waiting.append(opened.thread.submit(job, opened))

    def _take(self, opened: _Open) -> None:
        """Wait for the oldest job, and raise what it raised."""
        try:
            opened.waiting.popleft().result()
        except (OSError, sqlite3.Error) as error:
            raise EpisodeLogError(
                f"the episode log in {self.folder} could not be written ({error}); make room there, or turn it off "
                "with log_episodes=False"
            ) from error

    def _start(self) -> _Open:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._lock()
            index = self._open_index()
        except (OSError, sqlite3.Error) as error:
            raise EpisodeLogError(
                f"the episode log in {self.folder} cannot be opened ({error}); give another output_dir, or turn it off "
                "with log_episodes=False"
            ) from error
        import pyarrow.parquet  # noqa: F401 (its import takes time and memory, which steps should not)

        number, group = index.next_numbers()
        serial = 1 + max((serial_of(path.name) for path in part_files(self.folder)), default=-1)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="envgrad-episodes")
        opened = _Open(index=index, lock=lock, thread=thread, number=number, group=group, serial=serial)
        texts = {
            "run.json": None if self._describe is None else json.dumps(self._describe(), indent=2, default=str),
            "tokenizer.json": None if self._tokenizer is None else self._tokenizer(),
        }
        opened.waiting.append(thread.submit(self._write_texts, texts))
        return opened

    def _lock(self) -> IO[str]:
        """Held while the log is open: one run writes into a folder."""
        lock = (self.folder / ".lock").open("a")
        deadline = time.monotonic() + LOCK_SECONDS
        while not _taken(lock):
            if time.monotonic() > deadline:
                lock.close()
                raise ConfigurationError(
                    f"another run writes its episodes into {self.folder} at this moment; give this one an output_dir "
                    "of its own, or wait for the other's end"
                )
            time.sleep(0.05)
        return lock

    def _open_index(self) -> EpisodeIndex:
        """The index, made again from the parts where it is broken, with what a killed run had not indexed."""
        path = self.folder / INDEX_NAME
        if path.exists() and not _is_index(path):
            logger.warning("%s is broken; it is made again from the parts, without the metrics of steps", path)
            for leftover in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
                leftover.unlink(missing_ok=True)
        for half in self.folder.glob("*.tmp"):
            half.unlink()
        index = EpisodeIndex(path)
        for part in index.parts():
            if not (self.folder / part.name).is_file():
                index.drop(part)
        for covered in add_missing(index, self.folder):
            covered.unlink()
        return index

    # -- what the thread does

    def _write(self, opened: _Open, played: Round, step: int, credit: Callable[[], Credit]) -> None:
        rows = Flattener(step=step, credit=credit(), number=opened.number, group=opened.group).rows(played)
        opened.index.add(rows)
        opened.number, opened.group = rows[-1]["number"] + 1, rows[-1]["group"] + 1
        opened.size += sum(len(row["body"]) + 4 * len(row["mask"]) for row in rows)
        if opened.size >= PART_BYTES or opened.index.num_open() >= PART_EPISODES:
            self._write_part(opened)

    def _write_part(self, opened: _Open) -> None:
        """Move what the index holds whole into a part, and drop the oldest part where there is no room."""
        rows = opened.index.open_rows()
        if rows:
            opened.index.move_to(write_part(self.folder / part_name(opened.serial), rows))
            opened.serial += 1
            opened.size = 0
            self._make_room(opened)

    def _make_room(self, opened: _Open) -> None:
        if self._limit is None:
            return
        parts = opened.index.parts()
        taken = sum(part.size for part in parts) + (self.folder / INDEX_NAME).stat().st_size
        while taken > self._limit and len(parts) > 1:
            oldest = parts.pop(0)
            taken -= oldest.size
            opened.index.drop(oldest)
            (self.folder / oldest.name).unlink(missing_ok=True)
            if not self._told_of_limit:
                self._told_of_limit = True
                logger.warning(
                    "the episode log in %s has reached its limit of %.3g GB (episode_log_gb): from now on its oldest "
                    "episodes are dropped, beginning with %d to %d; curves keep their steps. This is said once.",
                    self.folder, self._limit / 1e9, oldest.first, oldest.last,
                )  # fmt: skip

    def _begin(self, opened: _Open, step: int) -> None:
        with (self.folder / RESUMES_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "before": opened.number}) + "\n")
        opened.index.leave_behind(step)

    def _write_texts(self, texts: Mapping[str, str | None]) -> None:
        for name, text in texts.items():
            if text is not None:
                beside = self.folder / f"{name}.tmp"
                beside.write_text(text + "\n", encoding="utf-8")
                beside.replace(self.folder / name)


def _taken(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_index(path: Path) -> bool:
    with closing(sqlite3.connect(path)) as connection:
        return is_sound(connection)
