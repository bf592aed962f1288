"""What a check found, as records, as JSON and as plain text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from envgrad.environments.start import StartMode

JSON_VERSION = 1
"""Changes when a field of ``CheckReport.as_dict`` is renamed, removed or means something else."""

Json: TypeAlias = dict[str, object]


class Level(StrEnum):
    """How bad a finding is, worst first."""

    BREACH = "breach"
    """the environment breaks the contract: training on it fails, or learns from wrong comparisons"""
    WARNING = "warning"
    """it can be trained on, but something is probably not what its author meant"""
    NOTE = "note"
    """good to know"""


class Rule(StrEnum):
    """What a finding is about: stable words, for programs that read the report."""

    CONTRACT = "contract"
    """construction refuses the class"""
    RAISED = "raised"
    """a member raised"""
    HANG = "hang"
    """a call did not come back in time"""
    PROMPT = "prompt"
    SCHEMA = "schema"
    STEP = "step"
    DONE = "done"
    REWARD = "reward"
    CLOSE = "close"
    NUM_TASKS = "num-tasks"
    SPLIT = "split"
    """training and evaluation share tasks"""
    DETERMINISM = "determinism"
    """equal ids, different episodes; or not what ``determinism`` declares"""
    START = "start"
    """siblings of a group would start differently"""
    IDS_IGNORED = "ids-ignored"
    """``reset`` takes ids, and each gives the same task"""
    REUSE = "reuse"
    """an episode leaves something behind in its instance"""
    SHARED = "shared-state"
    """instances share state"""
    GLOBAL_RANDOM = "global-random"
    PROCESS = "process-state"
    """the working folder or the environment variables changed"""
    FORK = "fork"
    PICKLE = "pickle"
    STATE = "state-dict"
    AUDIT = "reward-hack"
    NOT_CHECKED = "not-checked"


class Determinism(StrEnum):
    """What decides the task, and with it the whole episode, given the agent's actions."""

    FIXED = "fixed"
    """nothing: every reset gives the one task"""
    TASK = "task"
    """``task_index``, or the dataset's row"""
    SEEDED = "seeded"
    """``seed`` or ``group_id``"""
    NONE = "none"
    """something else: equal ids gave different episodes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found.

    Example:
        >>> print(Finding(level=Level.BREACH, rule=Rule.CLOSE, member="close", seen="it raised.", fix="Do not raise."))
        breach  close: it raised. -> Do not raise.
    """

    level: Level
    rule: Rule
    member: str
    """the member of the class, or what else it is about"""
    seen: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}  {self.member}: {self.seen} -> {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """What an agent without a model earned.

    Example:
        >>> AuditRow(agent="silent", does="writes nothing", rewards=(0.0, None, 1.0)).mean
        0.5
    """

    agent: str
    does: str
    rewards: tuple[float | None, ...]
    """one per episode; None where it could not be scored"""
    suspicious: bool = False
    """it earned what it should not have"""

    @property
    def mean(self) -> float | None:
        """Over the episodes that were scored; None if none was."""
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) / len(scored) if scored else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What ``check_environment`` found.

    Example:
        >>> report = CheckReport(environment="Game")
        >>> report.ok, str(report)
        (True, 'Game: no finding')
    """

    environment: str
    findings: tuple[Finding, ...] = ()
    """worst first"""
    declared: str | None = None
    """the environment's own ``determinism``"""
    determinism: Determinism | None = None
    """as it was seen; None if it could not be seen"""
    start: StartMode | None = None
    """how siblings of a group get their common start"""
    tools: tuple[str, ...] = ()
    """signatures"""
    failure: float | None = None
    """what an honest failure earns: the bar for the audit"""
    audit: tuple[AuditRow, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing breaks the contract; warnings and notes may be there."""
        return not self.at(Level.BREACH)

    def at(self, level: Level) -> tuple[Finding, ...]:
        """The findings of one level."""
        return tuple(finding for finding in self.findings if finding.level is level)

    def of(self, rule: Rule) -> tuple[Finding, ...]:
        """The findings about one rule."""
        return tuple(finding for finding in self.findings if finding.rule is rule)

    def as_dict(self) -> Json:
        """Plain data for JSON; ``version`` says which fields there are."""
        return {
            "version": JSON_VERSION,
            "environment": self.environment,
            "ok": self.ok,
            "counts": {str(level): len(self.at(level)) for level in Level},
            "determinism": {
                "declared": self.declared,
                "observed": None if self.determinism is None else str(self.determinism),
            },
            "start": None if self.start is None else str(self.start),
            "tools": list(self.tools),
            "findings": [
                {
                    "level": str(finding.level),
                    "rule": str(finding.rule),
                    "member": finding.member,
                    "seen": finding.seen,
                    "fix": finding.fix,
                }
                for finding in self.findings
            ],
            "audit": {
                "honest_failure": self.failure,
                "agents": [
                    {
                        "agent": row.agent,
                        "does": row.does,
                        "mean": row.mean,
                        "rewards": list(row.rewards),
                        "suspicious": row.suspicious,
                    }
                    for row in self.audit
                ],
            },
        }

    def __str__(self) -> str:
        """The findings, one a line: for ``assert report.ok, str(report)``."""
        lines = [str(finding) for finding in self.findings]
        return "\n".join([f"{self.environment}:", *lines]) if lines else f"{self.environment}: no finding"
