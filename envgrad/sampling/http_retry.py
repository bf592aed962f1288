"""What requests over HTTP have in common: which answers may be asked for again, how long to wait, what may be shown."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

CONNECT_SECONDS = 10.0
_REPEATED = (408, 409, 425, 429)
"""time-outs and conflicts that pass, and too many requests"""


def may_pass(status: int) -> bool:
    """Whether a request with this answer may be tried again; any other refusal is about what was asked.

    Example:
        >>> [status for status in (200, 400, 404, 408, 429, 500, 503) if may_pass(status)]
        [408, 429, 500, 503]
    """
    return status in _REPEATED or status >= 500


@dataclass(slots=True)
class Backoff:
    """Seconds between tries: doubled each time, with up to half of it more at random.

    Example:
        >>> waits = Backoff(1.0, 4.0)
        >>> bounds = [(1, 1.5), (2, 3), (4, 6), (4, 6)]
        >>> all(low <= waits.next() <= high for low, high in bounds)
        True
    """

    delay: float
    longest: float

    def next(self) -> float:
        wait = self.delay * (1 + random.random() / 2)
        self.delay = min(2 * self.delay, self.longest)
        return wait


@dataclass(frozen=True, slots=True)
class Shown:
    """Makes a server's text fit for messages: on one line, cut, and without what must not be seen.

    Example:
        >>> Shown.of({"Authorization": "Bearer hush"}, most=20).text("no\\n  hush, this is far too long")
        'no ***, this is far ...'
    """

    secrets: tuple[str, ...]
    most: int

    @classmethod
    def of(cls, headers: Mapping[str, str], *, most: int) -> Shown:
        """What ``headers`` hold is secret."""
        return cls(tuple(value.removeprefix("Bearer ") for value in headers.values()), most)

    def text(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        text = " ".join(text.split())
        return text if len(text) <= self.most else text[: self.most] + "..."
