"""Model-written programs, run with no network, a file system of their own, and limits: see ``sandbox.Sandbox``."""

from __future__ import annotations

from envgrad.environments.sandbox.command import SandboxUnavailable, unavailable
from envgrad.environments.sandbox.limits import RunResult, SandboxLimits
from envgrad.environments.sandbox.sandbox import Sandbox

__all__ = ["RunResult", "Sandbox", "SandboxLimits", "SandboxUnavailable", "unavailable"]
