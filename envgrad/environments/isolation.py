"""Environments that draw from the process-global random generators: found, and given streams of their own.

An environment that calls ``random.choice``, ``numpy.random.rand`` or ``random.seed`` shares one generator with all its
siblings, with every other environment and with the user's script: siblings start differently, and interleaved episodes
take each other's numbers. Here each instance gets a ``Stream``: the generators' states, seeded from the group, swapped
in around the instance's calls and out behind them::

    process:   s0 ------------------ s0 ------------------ s0
    instance A:   [reset: a0 -> a1]     [guess: a1 -> a2]
    instance B:                     [reset: b0 -> b1]            a0 = b0 for siblings of one group

One call at a time holds the generators (``generator_lock``), so sync calls of such environments run one after another;
async ones hold them for each step between two awaits. An environment that draws from no global generator is
found out by its first start, and is never swapped after it.

Tasks that an async environment starts are taken along. Outside of a stream's reach are threads and processes that an
environment starts, the generators of accelerators, and what other threads draw while a call is swapped in.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from envgrad.errors import ConfigurationError

logger = logging.getLogger(__name__)

MODES = ("auto", "always", "off")
_ALWAYS = frozenset({"random", "numpy"})
"""what is swapped in any case; torch's generator only where a start draws from it: training draws from it too"""


class _Source(Protocol):
    """One process-global generator. Its states are never changed in place."""

    def get(self) -> Any: ...

    def set(self, state: Any) -> None: ...

    def seeded(self, seed: int) -> Any: ...

    def plain(self, state: Any) -> object:
        """``state`` as something that compares by value."""
        ...


class _Python:
    """What ``random.random()`` draws from."""

    def get(self) -> Any:
        return random.getstate()

    def set(self, state: Any) -> None:
        random.setstate(state)

    def seeded(self, seed: int) -> Any:
        return random.Random(seed).getstate()

    def plain(self, state: Any) -> object:
        return state


class _Numpy:
    """What ``numpy.random.rand()`` draws from."""

    def __init__(self, module: Any) -> None:
        self._module = module.random  # loaded by this, if it was not: numpy waits for its first use

    def get(self) -> Any:
        return self._module.get_state(legacy=False)

    def set(self, state: Any) -> None:
        self._module.set_state(state)

    def seeded(self, seed: int) -> Any:
        words = [seed & 0xFFFFFFFF, seed >> 32, 1]  # the last one: not the numbers that `random` gives for this seed
        return self._module.RandomState(words).get_state(legacy=False)

    def plain(self, state: Any) -> object:
        if isinstance(state, Mapping):
            return {name: self.plain(value) for name, value in state.items()}
        return state.tobytes() if type(state).__module__ == "numpy" else state


class _Torch:
    """What ``torch.rand()`` draws from on the CPU."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get(self) -> Any:
        return self._module.get_rng_state()

    def set(self, state: Any) -> None:
        self._module.set_rng_state(state)

    def seeded(self, seed: int) -> Any:
        return self._module.Generator().manual_seed(seed).get_state()

    def plain(self, state: Any) -> object:
        return state.numpy().tobytes()


_PYTHON = _Python()
_LIBRARIES: tuple[tuple[str, str, Callable[[ModuleType], _Source]], ...] = (
    ("numpy", "__version__", _Numpy),
    ("torch", "set_rng_state", _Torch),
)


def _sources(names: frozenset[str] | None = None) -> dict[str, _Source]:
    """The generators of ``names`` (None: all) whose libraries are loaded; no library is imported for this."""
    found: dict[str, _Source] = {"random": _PYTHON} if names is None or "random" in names else {}
    for name, late, make in _LIBRARIES:
        module = sys.modules.get(name)
        if (names is None or name in names) and module is not None and hasattr(module, late):  # else: half imported
            found[name] = make(module)
    return found


def loaded_generators() -> frozenset[str]:
    """The process-global generators that can be watched now: those whose libraries are loaded."""
    return frozenset(_sources())


class Stream:
    """The global generators as one instance sees them.

    Args:
        seed: a non-negative integer below 2**64; equal seeds give equal streams.
        names: the generators it stands in for (those of libraries that are not loaded join when they are); None: all.

    Example:
        >>> def roll():
        ...     return random.randrange(100)
        >>> first, same = Stream(5), Stream(5)
        >>> before = random.getstate()
        >>> [first.run(roll) == same.run(roll) for _ in range(3)], random.getstate() == before
        ([True, True, True], True)
        >>> sorted(first.drawn())
        ['random']
    """

    __slots__ = ("_names", "_seed", "_states")

    def __init__(self, seed: int, names: frozenset[str] | None = None) -> None:
        self._seed = seed
        self._names = names
        self._states: dict[str, Any] = {}

    def run(self, call: Callable[[], Any]) -> Any:
        """Run ``call`` with this stream swapped in. The caller sees to it that nothing else runs so meanwhile."""
        sources = _sources(self._names)
        outside = {name: source.get() for name, source in sources.items()}
        for name, source in sources.items():
            source.set(self._states[name] if name in self._states else source.seeded(self._seed))
        try:
            return call()
        finally:
            for name, source in sources.items():
                self._states[name] = source.get()
                source.set(outside[name])

    def drawn(self) -> frozenset[str]:
        """The generators that calls have drawn from (or seeded anew) so far."""
        sources = _sources(self._names)
        return frozenset(
            name
            for name, state in self._states.items()
            if sources[name].plain(state) != sources[name].plain(sources[name].seeded(self._seed))
        )

    def copy(self, names: frozenset[str] | None = None) -> Stream:
        """A stream that goes on like this one and is independent of it; of ``names`` only, unless None."""
        copied = Stream(self._seed, self._names if names is None else names)
        copied._states.update({n: state for n, state in self._states.items() if names is None or n in names})
        return copied

    def difference(self, other: Stream) -> str | None:
        """The first generator in which two streams stand at different places; None if there is none."""
        sources = _sources(self._names)
        for name in sorted((self._states.keys() | other._states.keys()) & sources.keys()):
            first, second = (
                stream._states[name] if name in stream._states else sources[name].seeded(stream._seed)
                for stream in (self, other)
            )
            if first is not second and sources[name].plain(first) != sources[name].plain(second):
                return name
        return None


_CURRENT: ContextVar[Stream | None] = ContextVar("envgrad_stream", default=None)


@contextmanager
def use(stream: Stream | None) -> Iterator[None]:
    """User calls in the block (through ``boundary.call_user``) run with ``stream`` swapped in; None: as they are."""
    token = _CURRENT.set(stream)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_stream() -> Stream | None:
    """The stream of the innermost ``use`` around this task."""
    return _CURRENT.get()


def detect_global_draws(call: Callable[[], object]) -> frozenset[str]:
    """Run ``call`` and name the process-global generators whose state it changed: of ``random``, ``numpy``, ``torch``.

    The generators are left as they were found, also if ``call`` raises (its exception goes on). A library that
    ``call`` itself is the first to import cannot be judged. Run it while nothing else draws.

    Example:
        >>> sorted(detect_global_draws(lambda: random.random()))
        ['random']
        >>> sorted(detect_global_draws(lambda: random.Random(3).random()))
        []
    """
    sources = _sources()
    before = {name: source.get() for name, source in sources.items()}
    try:
        call()
        return frozenset(
            name for name, source in sources.items() if source.plain(source.get()) != source.plain(before[name])
        )
    finally:
        for name, source in sources.items():
            source.set(before[name])


@dataclass(slots=True)
class Isolation:
    """Whether the instances of one environment get streams of their own.

    ``auto`` finds out by the first start, which runs with a stream swapped in and is good whatever is found.

    Args:
        mode: ``auto``: of Python's and numpy's generators if the first start draws from one; ``always``: in any case,
            for environments that draw from them in their tools only; ``off``: never. Torch's joins if it is drawn from.

    Raises:
        ConfigurationError: another mode.

    Example:
        >>> isolation, first_start = Isolation(), Stream(5)
        >>> isolation.stream(seed=6) is None
        True
        >>> _ = first_start.run(random.random)
        >>> isolation.settle(first_start.drawn(), "dice")
        >>> isolation.active, isolation.stream(seed=6) is None
        (True, False)
    """

    mode: str = "auto"
    found: frozenset[str] | None = field(init=False, default=None)
    """the generators that the first start drew from; None before it"""
    draws_at_birth: bool = field(init=False, default=False)
    """the factory gives each instance random numbers of its own, so that every start needs a new instance"""
    probing: asyncio.Event | None = field(init=False, default=None)
    """set once the first start, which is under way, has ended"""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(f"isolate_generators={self.mode!r} must be one of {', '.join(MODES)}")

    @property
    def settled(self) -> bool:
        """Whether it is known if there is something to isolate."""
        return self.mode == "off" or self.found is not None

    @property
    def active(self) -> bool:
        """Whether instances have streams, as far as is known."""
        return self.mode == "always" or (self.mode == "auto" and bool(self.found))

    def settle(self, drawn: frozenset[str], name: str) -> None:
        """Keep what a first start of environment ``name`` drew from."""
        known = self.found or frozenset()
        self.found = known | drawn
        if self.mode == "auto" and not drawn <= known:
            logger.warning(
                "%s draws from the process-global random generators (%s): each of its instances gets a stream of its "
                "own, and its sync calls run one at a time. Let it draw from a random.Random or numpy Generator of its "
                "own for calls side by side; isolate_generators='off' leaves it as it is.",
                name, ", ".join(sorted(drawn)),
            )  # fmt: skip

    @property
    def names(self) -> frozenset[str] | None:
        """The generators that are swapped; None: all that are loaded."""
        if self.found is None:
            return None
        return self.found | _ALWAYS

    def stream(self, seed: int) -> Stream | None:
        """A stream for one start; None where nothing is isolated, as far as is known."""
        return Stream(seed, self.names) if self.active else None
