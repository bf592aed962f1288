"""Several samplers of one policy as one: each group's sessions stay with one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from envgrad.errors import ConfigurationError
from envgrad.sampling.sampler import Completion, Sampler, SamplingParams, Session

if TYPE_CHECKING:
    from torch import Tensor


class ReplicaSampler:
    """A ``Sampler`` of several, which serve the same policy and share the work by groups.

    Siblings go to one replica, which forwards their prompt once: the one with the fewest open sessions when the group
    begins; with ``by_position`` the one that the task's position says, so that no clock decides.

    Args:
        make: Makes one replica. All are made at once, in threads.
        replicas: How many; at least 1.
        by_position: See above.

    Raises:
        ConfigurationError: ``replicas`` is below 1.
        Exception: what kept a replica from being made. Those that were made are closed.

    Example:
        >>> from envgrad.sampling.scripted import ScriptedSampler
        >>> sampler = ReplicaSampler(lambda: ScriptedSampler(lambda *_: [1]), 2)
        >>> for group, sibling in ((0, 0), (0, 1), (1, 0)):
        ...     sampler.begin(Session(key=f"{group}/{sibling}", group=f"{group}", order=(group, sibling, 0)))
        >>> [sampler.open_sessions(one) for one in (0, 1)]
        [2, 1]
        >>> sampler.close()
    """

    def __init__(self, make: Callable[[], Sampler], replicas: int, *, by_position: bool = False) -> None:
        if replicas < 1:
            raise ConfigurationError(f"replicas must be at least 1, got {replicas}")
        self._by_position = by_position
        self._chosen: dict[str, int] = {}
        """the replica of each open session, by its key"""
        self._of_group: dict[str, int] = {}
        self._in_group: Counter[str] = Counter()
        with ExitStack() as undo, ThreadPoolExecutor(replicas, thread_name_prefix="envgrad-replicas") as pool:
            starting = [pool.submit(make) for _ in range(replicas)]
            for one in starting:
                if one.exception() is None:
                    undo.callback(one.result().close)
            self._samplers: Sequence[Sampler] = [one.result() for one in starting]
            undo.pop_all()

    def open_sessions(self, replica: int) -> int:
        """Sessions that replica number ``replica`` serves now."""
        return sum(chosen == replica for chosen in self._chosen.values())

    def begin(self, session: Session) -> None:
        chosen = self._of_group.get(session.group)
        if chosen is None:
            chosen = self._choose(session)
        self._samplers[chosen].begin(session)
        self._of_group[session.group] = self._chosen[session.key] = chosen
        self._in_group[session.group] += 1

    def _choose(self, session: Session) -> int:
        if self._by_position:
            return session.order[0] % len(self._samplers)
        return min(range(len(self._samplers)), key=self.open_sessions)

    def end(self, session: Session) -> None:
        chosen = self._chosen.pop(session.key, None)
        if chosen is None:
            return
        self._in_group[session.group] -= 1
        if not self._in_group[session.group]:
            del self._in_group[session.group], self._of_group[session.group]
        self._samplers[chosen].end(session)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        chosen = self._chosen.get(session.key)
        if chosen is None:
            raise ConfigurationError(f"session {session.key!r} has not begun; call begin(session) before sample")
        return await self._samplers[chosen].sample(prompt_ids, params, session)

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        """Of all replicas, at once. If one fails, others may serve the new version already: the error is raised when
        all have answered, and a run ends with it."""
        with ThreadPoolExecutor(len(self._samplers), thread_name_prefix="envgrad-replicas") as pool:
            updates = [pool.submit(one.update_weights, version, named_tensors) for one in self._samplers]
        for update in updates:
            update.result()

    @property
    def policy_version(self) -> int:
        """The oldest that one of them serves."""
        return min(one.policy_version for one in self._samplers)

    @property
    def exact_logprobs(self) -> bool:
        return all(one.exact_logprobs for one in self._samplers)

    @property
    def max_context(self) -> int:
        return min(one.max_context for one in self._samplers)

    def close(self) -> None:
        """Close all; an error is raised when all are closed."""
        with ExitStack() as closing:
            for one in self._samplers:
                closing.callback(one.close)
