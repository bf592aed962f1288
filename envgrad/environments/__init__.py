"""Environments: what users write, and how the library calls it."""

from __future__ import annotations

from envgrad.environments.contract import (
    RESERVED_NAMES,
    Environment,
    EnvironmentSpec,
    StepResult,
    ToolResult,
    inspect_environment,
    tool,
)
from envgrad.environments.pool import InstancePool
from envgrad.environments.tools import ToolSpec

__all__ = [
    "RESERVED_NAMES",
    "Environment",
    "EnvironmentSpec",
    "InstancePool",
    "StepResult",
    "ToolResult",
    "ToolSpec",
    "inspect_environment",
    "tool",
]
