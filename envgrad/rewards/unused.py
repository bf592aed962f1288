"""Weights that weigh nothing: an environment's components are known once it has been scored, and not before."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from envgrad.rewards.functions import nearest
from envgrad.types import Group

logger = logging.getLogger(__name__)


class UnusedWeights:
    """Warns once of names in ``reward_weights`` under which nothing was earned, when each environment has been scored.

    No error, since an environment may name a component in some episodes only.

    Args:
        names: The names that have weights.
        environments: The environments that are played.

    Example:
        >>> unused = UnusedWeights(["Game", "stlye"], ["Game"])
        >>> unused.message({"Game": None, "style": 1.0})
        "reward_weights has 'stlye' (did you mean 'style'?), and no reward bears that name so far, so its weight does \
nothing; rewards are Game, style"
    """

    def __init__(self, names: Iterable[str], environments: Iterable[str]) -> None:
        self._names = tuple(names)
        self._waiting = set(environments)
        self._seen: set[str] = set()

    def observe(self, groups: Iterable[Group]) -> None:
        """A round has been scored."""
        if not self._names:
            return
        for group in groups:
            for episode in group.episodes:
                self._seen.update(episode.rewards)
                self._waiting.discard(group.task.environment)
        if self._waiting:
            return
        message = self.message(self._seen)
        if message is not None:
            logger.warning("%s", message)
        self._names = ()

    def message(self, seen: Collection[str]) -> str | None:
        """What is wrong, if rewards of these names were seen; None if nothing is."""
        unused = [name for name in self._names if name not in seen]
        if not unused:
            return None
        return (
            f"reward_weights has {unused[0]!r}{nearest(unused[0], seen)}, and no reward bears that name so far, so its "
            f"weight does nothing; rewards are {', '.join(sorted(seen)) or 'none'}"
        )
