"""What all instances of one OpenReward environment share: the connection to the server, and what is known of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envgrad.environments.adapters.background import run_in_background
from envgrad.environments.adapters.places import Places
from envgrad.environments.adapters.task_splits import TaskRange, task_ranges
from envgrad.errors import ConfigurationError, EnvironmentFailure

if TYPE_CHECKING:
    from openreward.api.environments.client import AsyncEnvironment, AsyncEnvironmentsAPI, AsyncSession

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What does not change between sessions."""

    ranges: Mapping[str, TaskRange]
    scores_groups: bool
    has_terminal: bool
    """the model's answer without a call goes into a tool that it does not see"""


class Link:
    """The connection to a server, shared by all instances; a pickle of it starts anew."""

    def __init__(self, options: tuple[str, str | None, str | None, str | None], places: int | None = None) -> None:
        self._options = options
        self.places: Places[AsyncSession] = Places(places)
        self._lock = threading.RLock()
        self._api: AsyncEnvironmentsAPI | None = None
        self._environment: AsyncEnvironment | None = None
        self._server: ServerFacts | None = None
        self._live = 0

    def __reduce__(self) -> tuple[type[Link], tuple[object, ...]]:
        return Link, (self._options, self.places.limit)

    @property
    def name(self) -> str:
        """For messages."""
        return self._options[1] or self._options[0]

    def enter(self) -> None:
        with self._lock:
            self._live += 1

    def leave(self) -> None:
        """An instance less; the last one closes the connection."""
        with self._lock:
            self._live -= 1
            api = None if self._live else self._api
            if api is None:
                return
            self._api = self._environment = None
        run_in_background(api.aclose(), timeout=CLOSE_SECONDS)

    async def environment(self) -> AsyncEnvironment:
        """On the background loop."""
        if self._environment is None:
            from openreward import AsyncOpenReward
            from openreward.api.environments.client import AsyncEnvironmentsAPI

            name, url, variant, api_key = self._options
            if url is None:
                self._api = AsyncOpenReward(api_key=api_key).environments
            else:
                self._api = AsyncEnvironmentsAPI(url, api_key or "")
            self._environment = self._api.get(name, variant, base_url=url)
        return self._environment

    def server(self, split: str | None, eval_split: str | None, timeout: float) -> ServerFacts:
        """What the server says of itself.

        Raises:
            ConfigurationError: a split that it does not have.
            EnvironmentFailure: it does not answer.
        """
        with self._lock:
            if self._server is None:
                try:
                    splits, counts, groups, terminal = run_in_background(self._ask(), timeout=timeout)
                except client_errors() as error:
                    raise EnvironmentFailure(f"no OpenReward server answers at {self._options[1]}: {error}") from error
                if not splits:
                    raise ConfigurationError(f"environment {self._options[0]!r} has no split, and so no task")
                ranges = task_ranges(split or splits[0], eval_split, splits, counts.__getitem__)
                self._server = ServerFacts(ranges=ranges, scores_groups=groups, has_terminal=terminal)
            return self._server

    async def _ask(self) -> tuple[list[str], dict[str, int], bool, bool]:
        environment = await self.environment()
        splits = sorted(await environment.list_splits(), key=lambda split: split != "train")
        counts = {split: await environment.num_tasks(split) for split in splits}
        return splits, counts, await environment.supports_score_group(), (await environment.terminal_tool()) is not None


def client_errors() -> tuple[type[Exception], ...]:
    """What the client raises where the server, or the way to it, fails."""
    import aiohttp
    from openreward.api.errors import OpenRewardError

    return OpenRewardError, aiohttp.ClientError, OSError, RuntimeError, ValueError, KeyError
