"""The bench that an environment is checked on: its instances, its calls with a deadline, and what was found."""

from __future__ import annotations

import re
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from envgrad.environments.boundary import Ok, Raised, TimedOut, WorkerPool, call_user
from envgrad.environments.check.agent_play import AgentStage
from envgrad.environments.check.report import AuditRow, CheckReport, Determinism, Finding, Level, Rule
from envgrad.environments.contract import inspect_environment
from envgrad.environments.spec import EnvironmentSpec, Factory, member_of
from envgrad.environments.start import StartMode
from envgrad.errors import EnvgradError, EnvironmentContractError

_OURS = str(Path(__file__).parents[1])
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_ORDER = list(Level)
_LABEL = re.compile(r"^environment '[^']*'(?: \([^)]*\))?: ")
_COLON = re.compile(r"[:;] ")


class CallFailed(EnvgradError):
    """A call failed and its finding is written down: the check at hand cannot go on. Made by ``Bench.fail``."""

    def __init__(self, rule: Rule, member: str) -> None:
        super().__init__(f"{member} ({rule})")
        self.finding = rule, member


class Hung(CallFailed):
    """A call did not come back: nothing more is checked, since each further call may hang too."""


def method_of(instance: object, name: str) -> Callable[..., object]:
    """The bound method ``name`` of an environment."""
    method: Callable[..., object] = getattr(instance, name)
    return method


def place_of(error: BaseException) -> str:
    """Where in the user's code ``error`` was raised: file, line, function and the line itself; empty if unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    own = [frame for frame in frames if not frame.filename.startswith((*LIBRARIES, "<frozen"))]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    line = f": {frame.line}" if frame.line else ""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}{line}"


def told(error: BaseException) -> str:
    """An error in one line, with its place."""
    place = place_of(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text[:400]} ({place})" if place else text[:400]


class Bench:
    """Calls an environment, keeps its instances, and collects findings.

    Every call has ``timeout`` seconds. ``current`` is the call at hand and when it began, for whoever watches from
    another thread: an async member that never awaits cannot be stopped from within.
    """

    def __init__(self, *, name: str, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        self.current: tuple[str, float] | None = None
        self.determinism: Determinism | None = None
        self.start: StartMode | None = None
        self.tools: tuple[str, ...] = ()
        self.failure: float | None = None
        self.audit: tuple[AuditRow, ...] = ()
        self.noisy = False
        """equal episodes are rewarded differently"""
        self.isolated = False
        """games get generators of their own, as in training, since the process's are drawn from"""
        self.agents: AgentStage | None = None
        """who answers agents that own their loop"""
        self.agent_answers = 0
        """calls of one agent that are answered"""
        self._spec: EnvironmentSpec | None = None
        self._workers = WorkerPool(16, name="envgrad-check")
        self._findings: dict[tuple[Rule, str], Finding] = {}
        self._explained: set[tuple[Rule, str]] = set()
        self._open: dict[int, object] = {}

    @property
    def spec(self) -> EnvironmentSpec:
        if self._spec is None:
            raise AssertionError("inspect comes first")
        return self._spec

    def find(self, level: Level, rule: Rule, member: str, seen: str, fix: str) -> None:
        """Write a finding down; of several about one rule and member, the first of the worst level stays."""
        finding = Finding(level=level, rule=rule, member=member, seen=seen, fix=fix)
        known = self._findings.get((rule, member))
        if known is None or _ORDER.index(level) < _ORDER.index(known.level):
            self._findings[rule, member] = finding

    def fail(self, rule: Rule, member: str, seen: str, fix: str) -> CallFailed:
        """Write a breach down that ends the check at hand; raise what is returned."""
        self.find(Level.BREACH, rule, member, seen, fix)
        return CallFailed(rule, member)

    def explain(self, failed: CallFailed, more: str) -> None:
        """Add a sentence to the finding of a failed call, once."""
        if failed.finding not in self._explained:
            self._explained.add(failed.finding)
            known = self._findings[failed.finding]
            self._findings[failed.finding] = replace(known, seen=f"{known.seen} {more}")

    def found(self, rule: Rule, level: Level | None = None) -> bool:
        """Whether there is a finding about ``rule``, of ``level`` unless None."""
        findings = list(self._findings.values())
        return any(finding.rule is rule and level in (None, finding.level) for finding in findings)

    def report(self) -> CheckReport:
        """What is known so far."""
        findings = sorted([*self._findings.values()], key=lambda finding: _ORDER.index(finding.level))
        return CheckReport(
            environment=self.name,
            findings=tuple(findings),
            declared=None if self._spec is None else self._spec.determinism,
            determinism=self.determinism,
            start=self.start,
            tools=self.tools,
            failure=self.failure,
            audit=self.audit,
        )

    async def inspect(self, factory: Factory, columns: frozenset[str]) -> None:
        """Inspect the class, as construction of a trainer does."""
        outcome = await self.outcome("the factory", partial(inspect_environment, self.name, factory, columns=columns))
        match outcome:
            case Ok(value=(EnvironmentSpec() as spec, probe)):
                self._spec = spec
                self._open[id(probe)] = probe
            case Raised(error=EnvironmentContractError() as error):
                seen, fix = contract_parts(error)
                cause = error.__cause__
                place = f" ({told(cause)})" if cause is not None and place_of(cause) else ""
                raise self.fail(Rule.CONTRACT, "the class", seen + place, fix) from error
            case Raised(error=error):
                raise error  # inspection tells what user code does wrong; anything else is a fault of ours

    async def make(self) -> object:
        """A new instance."""
        instance = await self.value("the factory", self.spec.factory)
        if id(instance) in self._open:
            fix = "Build a new instance in each call: episodes run side by side."
            raise self.fail(Rule.CONTRACT, "the factory", "it returned the same instance twice.", fix)
        self.adopt(instance)
        return instance

    def adopt(self, instance: object) -> None:
        """Take over an instance that was made elsewhere (a fork): it is closed with the others."""
        self._open[id(instance)] = instance

    def forget(self, instance: object) -> None:
        """Leave the closing of an instance to the caller."""
        self._open.pop(id(instance), None)

    async def close(self, instance: object) -> None:
        """Close an instance, once."""
        if self._open.pop(id(instance), None) is not None and self.spec.has_close:
            outcome = await self.outcome("close", method_of(instance, "close"))
            if isinstance(outcome, Raised):
                fix = "Close what was opened, and nothing else: it is called on every way out."
                self.find(Level.BREACH, Rule.CLOSE, "close", f"it raised {told(outcome.error)}.", fix)

    async def close_all(self) -> None:
        """Close what is still open."""
        for instance in list(self._open.values()):
            await self.close(instance)

    def end(self) -> None:
        self._workers.close()

    async def value(
        self,
        member: str,
        call: Callable[..., object],
        /,
        *args: object,
        arguments: Mapping[str, object] | None = None,
    ) -> object:
        """The call's value.

        Raises:
            CallFailed: it raised; the finding names the member and the line.
            Hung: it did not come back.
        """
        outcome = await self.outcome(member, call, *args, arguments=arguments)
        if isinstance(outcome, Ok):
            return outcome.value
        if isinstance(outcome.error, EnvironmentContractError):
            seen, fix = contract_parts(outcome.error)
            raise self.fail(Rule.CONTRACT, member, seen, fix) from outcome.error
        fix = "Mend the line, or catch what it raises: here an error is a failed episode."
        raise self.fail(Rule.RAISED, member, f"it raised {told(outcome.error)}.", fix) from outcome.error

    async def outcome(
        self,
        member: str,
        call: Callable[..., object],
        /,
        *args: object,
        arguments: Mapping[str, object] | None = None,
    ) -> Ok | Raised:
        """What a call did.

        Raises:
            Hung: it did not come back.
        """
        self.current = member, time.monotonic()
        outcome = await call_user(
            f"{self.name}.{member}", call, *args, workers=self._workers, timeout=self.timeout, arguments=arguments
        )
        self.current = None
        if isinstance(outcome, TimedOut):
            self.hung(member)
            raise Hung(Rule.HANG, member)
        return outcome

    async def apart(self, play: Callable[[], object]) -> object:
        """The value of a sync call that plays on this bench in a loop of its own, and so has deadlines within."""
        outcome = await self._workers.outcome(play, timeout=None)
        if isinstance(outcome, Raised):
            raise outcome.error  # a CallFailed, or a fault of ours
        return outcome.value if isinstance(outcome, Ok) else None

    def hung(self, member: str) -> None:
        self.find(
            Level.BREACH,
            Rule.HANG,
            member,
            f"it did not return within {self.timeout:g} s.",
            "Give what it waits for a timeout of its own. If it is only slow, raise timeout.",
        )

    async def try_section(self, name: str, section: Callable[[], Awaitable[None]]) -> bool:
        """Run one check; False if a failed call ended it early, which then is a finding of its own."""
        try:
            await section()
        except Hung:
            raise
        except CallFailed:
            self.find(
                Level.NOTE,
                Rule.NOT_CHECKED,
                name,
                "this was not checked to its end, since a call failed.",
                "Mend the breach, and check again.",
            )
            return False
        return True

    def has(self, instance: object, name: str) -> bool:
        """Whether the instance has the member ``name``; no property is run."""
        return member_of(instance, name) is not None


def contract_parts(error: EnvironmentContractError) -> tuple[str, str]:
    """A contract error's message as what was seen and the fix, which it says behind its last colon.

    Example:
        >>> contract_parts(EnvironmentContractError("environment 'Game' (Game): 'reset' is missing: define reset."))
        ("'reset' is missing.", 'Define reset.')
    """
    text = _LABEL.sub("", " ".join(str(error).split()))
    for found in reversed(list(_COLON.finditer(text))):
        seen, fix = text[: found.start()], text[found.end() :]
        if not seen.count("'") % 2 and seen.count("(") == seen.count(")"):  # not inside a quotation
            return f"{seen}.", f"{fix[:1].upper()}{fix[1:].rstrip('.')}."
    return text, "Do as the contract says."
