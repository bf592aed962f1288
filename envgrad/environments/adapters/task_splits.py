"""Which of a server's tasks are for training and which for evaluation.

Our splits are ``train`` and ``eval``; a server calls its own as it likes. A part of one is written as a slice,
``"train[:80]"``, so that a server with one split can do for both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envgrad.errors import ConfigurationError

_PART = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")
HELD_OUT = 10
"""of a lone split, every tenth part (the last) is for evaluation"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRange:
    """Consecutive tasks of one of the server's splits."""

    name: str
    start: int
    count: int

    def index(self, task_index: int) -> int:
        """The server's index of our ``task_index``."""
        return self.start + task_index


def check_split(option: str, text: str) -> None:
    """
    Raises:
        ConfigurationError: ``text`` is no split's name, nor a slice of one.
    """
    if not isinstance(text, str) or _PART.fullmatch(text) is None:
        raise ConfigurationError(f"{option}={text!r} must be a split's name, or a part of it as 'train[:80]'")


def task_ranges(
    split: str, eval_split: str | None, known: Sequence[str], count: Callable[[str], int]
) -> dict[str, TaskRange]:
    """The tasks of ``train`` and of ``eval``.

    Args:
        split: the server's split for training, or a part of it.
        eval_split: the one for evaluation. None: ``validation``, ``eval`` or ``test``, whichever the server has first;
            a server without them lends the last tenth of ``split``, which training then leaves out.
        known: the server's splits.
        count: how many tasks a split of the server's has.

    Raises:
        ConfigurationError: a split that the server does not have, or a part without tasks.

    Example:
        >>> found = task_ranges("train", None, ["train"], lambda name: 30)
        >>> found["train"].count, found["eval"].index(0)
        (27, 27)
        >>> task_ranges("train[:5]", "train[5:]", ["train"], lambda name: 8)["eval"]
        TaskRange(name='train', start=5, count=3)
    """
    train = _range("split", split, known, count)
    if eval_split is None:
        other = next((name for name in ("validation", "eval", "test") if name in known and name != train.name), None)
        if other is None:
            return _held_out(train)
        eval_split = other
    return {"train": train, "eval": _range("eval_split", eval_split, known, count)}


def _held_out(train: TaskRange) -> dict[str, TaskRange]:
    if train.count < 2:
        return {"train": train, "eval": train}
    kept = train.count - max(1, train.count // HELD_OUT)
    return {
        "train": TaskRange(name=train.name, start=train.start, count=kept),
        "eval": TaskRange(name=train.name, start=train.start + kept, count=train.count - kept),
    }


def _range(option: str, text: str, known: Sequence[str], count: Callable[[str], int]) -> TaskRange:
    match = _PART.fullmatch(text)
    if match is None:
        raise AssertionError(f"{option}={text!r} was checked on construction")
    name = match["name"]
    if name not in known:
        raise ConfigurationError(f"{option}={text!r}: the server has no split {name!r}; it has {list(known)}")
    total = count(name)
    start = min(int(match["start"] or 0), total)
    stop = min(int(match["stop"]) if match["stop"] else total, total)
    if stop <= start:
        raise ConfigurationError(f"{option}={text!r} has no task: the server's split {name!r} has {total}")
    return TaskRange(name=name, start=start, count=stop - start)
