"""Logged episodes as JSON lines, for other tools. As a data set: ``envgrad.export_episodes``."""

from __future__ import annotations

from pathlib import Path

from envgrad.episodes.parts import as_json
from envgrad.episodes.reader import EpisodeReader
from envgrad.episodes.records import EpisodeFilter
from envgrad.episodes.whole import plain_record


def export_jsonl(run: str | Path, path: str | Path, filter: EpisodeFilter | None = None) -> int:
    """Write a run's episodes as JSON lines, one object each, oldest first; returns how many.

    Args:
        run: A run's ``output_dir``.
        path: The file, which is replaced.
        filter: Which episodes; all of the present lineage by default, failed ones and evaluations too.

    Raises:
        ConfigurationError: the run has no episode log.
        OSError: the file cannot be written.
    """
    with EpisodeReader(run) as reader, Path(path).open("w", encoding="utf-8") as file:
        numbers = [row.number for row in reader.rows(filter or EpisodeFilter(), order="oldest", limit=None)]
        for record in reader.episodes(numbers):
            file.write(as_json(plain_record(record)) + "\n")
    return len(numbers)
