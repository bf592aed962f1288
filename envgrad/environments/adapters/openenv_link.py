"""What all instances of one OpenEnv environment share: the server, and what is known of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence

from envgrad.environments.adapters.background import run_in_background
from envgrad.environments.adapters.openenv_server import Server
from envgrad.environments.adapters.openenv_text import ActionForm, read_action
from envgrad.environments.adapters.openenv_wire import CLOSE_SECONDS, Address, Session, fetch
from envgrad.environments.adapters.places import Places
from envgrad.environments.adapters.task_splits import TaskRange, task_ranges
from envgrad.errors import ConfigurationError, EnvironmentFailure

_HTTP_SECONDS = 30.0


def _stop_all(servers: list[Server]) -> None:
    while servers:
        servers.pop().stop()


async def _close_all(sessions: Sequence[Session]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))


class Link:
    """The way to a server, which it starts with the first instance and stops with the last. A pickle of it starts anew.

    Args:
        url: of a running server; None: ``start``.
        start: ``module:app`` of a server to start: see ``openenv_server.Server``.
        python, folder: the server's interpreter and working folder.
        headers: of every request.
        timeout: seconds until a started server must listen.
        places: sessions at once, from this process; None: no limit.
    """

    def __init__(
        self,
        url: str | None,
        start: str | None,
        python: str | None,
        folder: str | None,
        headers: Mapping[str, str],
        timeout: float,
        places: int | None = None,
    ) -> None:
        self._given = (url, start, python, folder, dict(headers), timeout)
        self.places: Places[Session] = Places(places)
        self._lock = threading.RLock()
        self._servers: list[Server] = []
        self._live = 0
        self._schema: object = None
        self._ranges: dict[str, TaskRange] | None = None
        weakref.finalize(self, _stop_all, self._servers)

    def __reduce__(self) -> tuple[type[Link], tuple[object, ...]]:
        return Link, (*self._given, self.places.limit)

    def enter(self) -> None:
        """An instance more."""
        with self._lock:
            self._live += 1

    def leave(self) -> None:
        """An instance less; the last one closes the sessions that were kept, and ends the server."""
        with self._lock:
            self._live -= 1
            if self._live:
                return
            kept = self.places.drain()
            if kept:
                with contextlib.suppress(TimeoutError):  # each gives up by itself before
                    run_in_background(_close_all(kept), timeout=2 * CLOSE_SECONDS)
            _stop_all(self._servers)

    @property
    def address(self) -> Address:
        """Where the server is; it is started if it does not run.

        Raises:
            EnvironmentFailure: it cannot be started.
        """
        url, start, python, folder, headers, timeout = self._given
        if start is None:
            return Address.of(url or "", headers)
        with self._lock:
            if self._servers and not self._servers[0].running:
                _stop_all(self._servers)
            if not self._servers:
                self._servers.append(Server(start, python=python, folder=folder, timeout=timeout))
            return Address.of(self._servers[0].url, headers)

    def form(self, text: str | bool | None, tool: str | None) -> ActionForm:
        """How a model acts.

        Raises:
            EnvironmentFailure: the server does not answer.
            EnvironmentContractError: its schema of actions cannot be read.
        """
        with self._lock:
            if self._schema is None:
                self._schema = fetch(self.address, "/schema", timeout=_HTTP_SECONDS)
            if not isinstance(self._schema, Mapping):
                raise EnvironmentFailure(
                    f"{self.address.http}/schema says nothing of actions: is it an OpenEnv server?"
                )
            return read_action(self._schema.get("action"), text, tool)

    def ranges(self, split: str | None, eval_split: str | None) -> dict[str, TaskRange] | None:
        """The server's tasks for ``train`` and ``eval``; None if it has none.

        Raises:
            ConfigurationError: a split that it does not have.
        """
        with self._lock:
            if self._ranges is None:
                name, splits = self._splits()
                if splits:
                    self._ranges = task_ranges(split or splits[0], eval_split, splits, lambda of: self._count(name, of))
                elif split or eval_split:
                    given = f"split={split!r}" if split else f"eval_split={eval_split!r}"
                    raise ConfigurationError(f"{given} cannot act: the server at {self.address.http} has no tasks")
            return self._ranges

    def _splits(self) -> tuple[str, list[str]]:
        names = fetch(self.address, "/list_environments", timeout=_HTTP_SECONDS)
        if not isinstance(names, list) or not names:
            return "", []
        found = fetch(self.address, f"/{names[0]}/splits", timeout=_HTTP_SECONDS)
        splits = [item["name"] for item in found if isinstance(item, dict)] if isinstance(found, list) else []
        return str(names[0]), sorted(splits, key=lambda split: split != "train")

    def _count(self, name: str, split: str) -> int:
        answer = fetch(self.address, f"/{name}/num_tasks", {"split": split}, timeout=_HTTP_SECONDS)
        count = answer.get("num_tasks") if isinstance(answer, dict) else None
        if isinstance(count, bool) or not isinstance(count, int):
            raise EnvironmentFailure(
                f"{self.address.http} does not count the tasks of {split!r}: it answered {answer!r}"
            )
        return count
