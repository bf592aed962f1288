"""Environments of other ecosystems as ordinary environments; one file each, none imported before it is asked for."""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "GymnasiumEnvironment": "gymnasium",
    "HarborEnvironment": "harbor",
    "MCPEnvironment": "mcp",
    "MCPEpisode": "mcp",
    "MCPServer": "mcp",
    "OpenEnvEnvironment": "openenv",
    "OpenRewardEnvironment": "openreward",
    "OtherPython": "other_python",
    "ReasoningGymEnvironment": "reasoning_gym",
    "TextArenaEnvironment": "textarena",
}
"""name -> the module of this package that has it"""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
