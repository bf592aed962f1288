"""Which sessions a sampler has open, and which of them await an answer: the rules that all samplers share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from envgrad.errors import ConfigurationError
from envgrad.sampling.sampler import Session


class OpenSessions:
    """Sessions between ``begin`` and ``end``, by their keys. One thread owns it.

    Example:
        >>> sessions, one = OpenSessions(), Session(key="train/0/0", group="train/0", order=(0, 0, 0))
        >>> sessions.begin(one)
        >>> sorted(sessions.keys), sessions.end(one), sessions.end(one)
        (['train/0/0'], True, False)
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._asking: set[str] = set()

    @property
    def keys(self) -> frozenset[str]:
        """Of the sessions that have begun and not ended."""
        return frozenset(self._keys)

    def begin(self, session: Session) -> None:
        """
        Raises:
            ConfigurationError: it has begun already.
        """
        if session.key in self._keys:
            raise ConfigurationError(f"session {session.key!r} has begun already; end it before it begins again")
        self._keys.add(session.key)

    def end(self, session: Session) -> bool:
        """Whether it was open. Safe to call twice."""
        known = session.key in self._keys
        self._keys.discard(session.key)
        return known

    def check(self, session: Session) -> None:
        """
        Raises:
            ConfigurationError: it has not begun, or has ended.
        """
        if session.key not in self._keys:
            raise ConfigurationError(f"session {session.key!r} has not begun; call begin(session) before sample")

    @contextmanager
    def asking(self, session: Session) -> Iterator[None]:
        """While one answer is awaited.

        Raises:
            ConfigurationError: it has not begun, or awaits an answer already.
        """
        self.check(session)
        if session.key in self._asking:
            raise ConfigurationError(f"session {session.key!r} has a request already; await its answer first")
        self._asking.add(session.key)
        try:
            yield
        finally:
            self._asking.discard(session.key)
