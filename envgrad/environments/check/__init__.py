"""The contract as a function that users call in their tests: ``check_environment``."""

from __future__ import annotations

from envgrad.environments.check.report import AuditRow, CheckReport, Determinism, Finding, Level, Rule
from envgrad.environments.check.run import check_environment

__all__ = ["AuditRow", "CheckReport", "Determinism", "Finding", "Level", "Rule", "check_environment"]
