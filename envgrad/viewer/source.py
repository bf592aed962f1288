"""A run's episode log as the data that the page asks for: plain values that JSON holds.

The one file here that knows ``EpisodeReader``. Ids of 63 bits become strings, because JavaScript's numbers hold 53.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any, TypeAlias

from envgrad.episodes import EpisodeFilter, EpisodeReader, EpisodeRecord, EpisodeSummary, StepSummary
from envgrad.episodes.records import Order
from envgrad.errors import ConfigurationError
from envgrad.viewer.pieces import TokenDecoder

Plain: TypeAlias = dict[str, Any]

MAX_GROUPS = 100
"""groups of a step that one page shows"""
MAX_POINTS = 600
"""points of a metric's curve; longer ones are averaged in stretches"""
HEADLINES = {
    "reward": "reward",
    "eval_reward": "eval_reward",
    "truncated": "completions/clipped_ratio",
    "turns": "episodes/turns",
    "tokens": "completions/mean_length",
}
"""figures at the top of the page: the trainer's metrics behind them"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Which run a page may ask for: ``a`` is the first on the command line, ``b`` the second."""

    id: str
    name: str
    folder: Path


class RunSource:
    """One run's data. Its methods may be called from several threads.

    Args:
        place: The run.

    Raises:
        ConfigurationError: the folder holds no episode log.
    """

    def __init__(self, place: RunPlace) -> None:
        self.place = place
        self._reader = EpisodeReader(place.folder)
        self._decoder = TokenDecoder(place.folder)
        self._counted: tuple[str, Plain] | None = None
        self._counting = threading.Lock()

    def close(self) -> None:
        self._reader.close()

    def warm(self) -> None:
        """Count, and read one episode, so that the first page does not wait for it and for libraries to load."""
        with suppress(sqlite3.Error, OSError):  # the page that asks next is told
            self.run()
            self._records(self._reader.rows(limit=1))

    def run(self) -> Plain:
        """What the run has to choose from, and how much of it; counted anew only after something was written."""
        with self._counting:
            cursor = self.cursor()
            if self._counted is None or self._counted[0] != cursor:
                self._counted = (cursor, self._count())
            return dict(self._counted[1])

    def _count(self) -> Plain:
        reader = self._reader
        return {
            "id": self.place.id,
            "name": self.place.name,
            "folder": str(self.place.folder),
            "environments": reader.environments(),
            "splits": sorted(reader.splits(), key=lambda split: (split != "train", split)),
            "stop_reasons": reader.stop_reasons(),
            "episodes": reader.count(EpisodeFilter()),
            "parts": reader.count(EpisodeFilter(part="")) < reader.count(EpisodeFilter()),
            "left_behind": reader.count(EpisodeFilter(current=False)),
            "dropped": reader.dropped_episodes(),
            "about": _about(self.place.folder / "episodes" / "run.json"),
        }

    def cursor(self) -> str:
        """Where ``news`` goes on from."""
        return self._reader.follow().cursor

    def news(self, since: str | None) -> Plain:
        """Whether there is something new since ``since``, and the run's figures if so.

        Raises:
            ConfigurationError: ``since`` is no cursor.
        """
        if since is not None and not re.fullmatch(r"-?\d{1,18}(\.-?\d{1,18}){2}", since):
            raise ConfigurationError(f"since={since[:60]!r} is no cursor of this log; leave it out to begin anew")
        news = self._reader.follow(since)
        changed = news.changed or news.reset
        return {
            "cursor": news.cursor,
            "changed": news.changed,
            "reset": news.reset,
            "run": self.run() if changed else None,
        }

    def steps(self) -> Plain:
        """Columns over all steps: rewards by environment, and how many episodes."""
        steps = self._reader.steps()
        return {
            "steps": [step.step for step in steps],
            "rewards": _by_name([step.rewards for step in steps]),
            "eval_rewards": _by_name([step.eval_rewards for step in steps]),
            "episodes": [step.episodes for step in steps],
            "eval_episodes": [step.eval_episodes for step in steps],
            "failed": [step.failed for step in steps],
            "headline": {name: [_headline(step, name) for step in steps] for name in HEADLINES},
        }

    def metrics(self) -> dict[str, list[tuple[float, float]]]:
        """Every logged metric as a curve of at most ``MAX_POINTS`` points (step, value)."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for step in self._reader.steps():
            for name, value in step.metrics.items():
                if value is not None and isfinite(value):
                    curves.setdefault(name, []).append((step.step, value))
        return {name: thinned(points, MAX_POINTS) for name, points in curves.items()}

    def episodes(self, chosen: EpisodeFilter, *, order: Order, limit: int, offset: int) -> Plain:
        """A page of the list, and how many there are."""
        rows = self._reader.rows(chosen, order=order, limit=limit, offset=offset) if limit else []
        return {"rows": self._lines(rows), "total": self._reader.count(chosen)}

    def step(self, step: int | None, split: str | None, environment: str | None) -> Plain:
        """A step's groups; the newest step that has any without ``step``, training before evaluation."""
        steps = self._reader.steps()
        played = {
            "train": [one.step for one in steps if one.episodes],
            "eval": [one.step for one in steps if one.eval_episodes],
        }
        if split is None:
            alone = step is not None and step in played["eval"] and step not in played["train"]
            split = "eval" if played["eval"] and (alone or not played["train"]) else "train"
        known = played.get(split, [])
        if step is None:
            step = max(known, default=None)
        before = [one for one in known if step is not None and one < step]
        after = [one for one in known if step is not None and one > step]
        groups = [] if step is None else self._reader.groups(step, split)
        environments = sorted({group[0].environment for group in groups if group[0].environment})
        kept = [group for group in groups if environment in (None, group[0].environment)]
        shown = kept[:MAX_GROUPS]
        lines = iter(self._lines([row for group in shown for row in group]))
        return {
            "step": step,
            "split": split,
            "splits": [name for name, having in played.items() if step in having],
            "environments": environments,
            "groups": [{"group": group[0].group, "rows": [next(lines) for _ in group]} for group in shown],
            "more": len(kept) - len(shown),
            "previous": max(before, default=None),
            "next": min(after, default=None),
        }

    def group(self, group: int) -> Plain:
        """The siblings whole, with their common opening once.

        Raises:
            ConfigurationError: there is no such group.
        """
        rows = self._reader.group(group)
        if not rows:
            raise ConfigurationError(f"there is no group {group}; old parts of the log may have been dropped")
        records = self._records(rows)
        beside = [one[0].group for one in self._reader.groups(rows[0].step, rows[0].split)]
        at = beside.index(group) if group in beside else -1
        openings = [
            list(one.messages[: one.opening]) for one in records if one and one.opening and not one.summary.part
        ]
        same = bool(openings) and all(opening == openings[0] for opening in openings)
        return {
            "group": group,
            "opening": plain(openings[0]) if same else [],
            "episodes": [_sibling(row, record) for row, record in zip(rows, records, strict=True)],
            "previous": beside[at - 1] if at > 0 else None,
            "next": beside[at + 1] if 0 <= at < len(beside) - 1 else None,
        }

    def episode(self, number: int) -> Plain:
        """One episode whole, without its tokens.

        Raises:
            ConfigurationError: there is none with this number, or its part was dropped.
        """
        record = self._reader.episode(number)
        siblings = self._reader.group(record.summary.group)
        return _sibling(record.summary, record) | {
            "tools": plain(record.tools),
            "plain_prompt": record.plain_prompt,
            "rows": [{"length": len(row.token_ids)} for row in record.rows],
            "branches": max(0, len(record.rows) - 1),
            "seconds": plain(record.seconds),
            "extras": plain(record.extras),
            "feedback": record.feedback,
            "epoch": record.epoch,
            "row": None if record.row is None else plain(record.row),
            "siblings": [{"number": one.number, "sibling": one.sibling} for one in siblings],
        }

    def tokens(self, number: int, row: int) -> Plain:
        """A token row in columns [T]; ``None`` for columns that the run did not write, and at tokens not sampled.

        Raises:
            ConfigurationError: no such episode or row.
        """
        rows = self._reader.episode(number).rows
        if not 0 <= row < len(rows):
            raise ConfigurationError(f"episode {number} has {len(rows)} token rows, so there is no row {row}")
        one = rows[row]
        texts = self._decoder.texts(one.token_ids)
        ratios = None
        if one.trainer_logprobs is not None:
            ratios = [_ratio(ours, theirs) for ours, theirs in zip(one.trainer_logprobs, one.logprobs, strict=True)]
        columns = {"logprobs": one.logprobs, "ratios": ratios, "advantages": one.advantages}
        return {
            "ids": list(one.token_ids),
            "texts": texts,
            "decoded": texts is not None,
            "mask": list(one.mask),
            "versions": list(one.versions),
            "prompt_length": one.prompt_length,
        } | {name: None if values is None else _at_sampled(values, one.mask) for name, values in columns.items()}

    def _records(self, rows: Sequence[EpisodeSummary]) -> list[EpisodeRecord | None]:
        """The episodes whole; None for those whose part was dropped since the rows were read."""
        numbers = [row.number for row in rows]
        try:
            found = {record.summary.number: record for record in self._reader.episodes(numbers)}
        except ConfigurationError:
            found = {}
        return [found.get(number) for number in numbers]

    def _lines(self, rows: Sequence[EpisodeSummary]) -> list[Plain]:
        """Rows with a line of their text."""
        previews = self._reader.previews([row.number for row in rows])
        lines = []
        for row in rows:
            preview = previews.get(row.number)
            texts = {"prompt": preview.prompt, "answer": preview.answer} if preview else {"prompt": "", "answer": ""}
            lines.append(_summary(row) | texts)
        return lines


def _about(path: Path) -> list[str]:
    """What ``run.json`` tells in a few words: the algorithm and the seed."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(told, dict):
        return []
    known = [told.get("algorithm"), None if told.get("seed") is None else f"seed {told['seed']}"]
    return [str(word) for word in known if word]


def _summary(row: EpisodeSummary) -> Plain:
    values: Plain = plain(asdict(row))
    return values | {"group_id": str(row.group_id), "seed": str(row.seed)}


def _sibling(row: EpisodeSummary, record: EpisodeRecord | None) -> Plain:
    """What the conversation of one episode needs."""
    if record is None:
        return {"summary": _summary(row), "messages": [], "opening": 0, "turns": [], "error": None, "dropped": True}
    return {
        "summary": _summary(row),
        "messages": plain(record.messages),
        "opening": record.opening,
        "turns": [plain(asdict(turn)) for turn in record.turns],
        "error": record.error,
        "dropped": False,
    }


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: what is neither number, text, list nor mapping becomes its ``str``; NaN becomes None.

    Example:
        >>> plain({"a": (1, float("nan")), 2: Path("x")})
        {'a': [1, None], '2': 'x'}
    """
    if value is None or isinstance(value, str | bool | int):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most ``most`` points: means of stretches of equal length, the last point as it is.

    Example:
        >>> thinned([(0, 1.0), (1, 3.0), (2, 5.0), (3, 7.0), (4, 9.0)], 3)
        [(0.5, 2.0), (2.5, 6.0), (4, 9.0)]
        >>> thinned([(0, 1.0)], 3)
        [(0, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    size = -(-(len(points) - 1) // (most - 1))
    kept = []
    for start in range(0, len(points) - 1, size):
        stretch = points[start : min(start + size, len(points) - 1)]
        kept.append((sum(x for x, _ in stretch) / len(stretch), sum(y for _, y in stretch) / len(stretch)))
    return [*kept, points[-1]]


def _by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """{name: [steps]}; None where a step has no value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_finite(row.get(name)) for row in rows] for name in names}


def _headline(step: StepSummary, name: str) -> float | None:
    logged = _finite(step.metrics.get(HEADLINES[name]))
    if logged is not None or name not in ("reward", "eval_reward"):
        return logged
    return _mean((step.rewards if name == "reward" else step.eval_rewards).values())


def _mean(values: Iterable[float]) -> float | None:
    kept = [value for value in values if isfinite(value)]
    return sum(kept) / len(kept) if kept else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _ratio(ours: float, theirs: float) -> float:
    return exp(min(ours - theirs, 700.0))


def _at_sampled(values: Sequence[float], mask: Sequence[int]) -> list[float | None]:
    return [
        round(value, 6) if sampled and isfinite(value) else None for value, sampled in zip(values, mask, strict=True)
    ]
