"""What an instance says of itself (``instance.describe``), as its stand-in here needs it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from envgrad.environments.remote.wire import Message
from envgrad.environments.tools import ToolSpec


def reset_signature(described: Message) -> inspect.Signature:
    """The signature of the environment's own ``reset``, so that the contract reads the stand-in's as that.

    Example:
        >>> str(reset_signature({"reset_names": ["level", "seed"], "reset_required": ["seed"]}))
        '(self, *, level=None, seed, **given)'
    """
    kind, required = inspect.Parameter, set(described["reset_required"])
    named = [
        kind(name, kind.KEYWORD_ONLY, default=kind.empty if name in required else None)
        for name in described["reset_names"]
    ]
    first, rest = kind("self", kind.POSITIONAL_OR_KEYWORD), kind("given", kind.VAR_KEYWORD)
    return inspect.Signature([first, *named, rest])


def tool_specs(described: Sequence[Message]) -> tuple[ToolSpec, ...]:
    """The schemas as they are there; enums are made from their values there too."""
    return tuple(
        ToolSpec(
            name=tool["name"],
            schema=tool["schema"],
            method="_call_tool",
            is_async=True,
            by_name=True,
            takes_extra=tool["takes_extra"],
            none_defaults=frozenset(tool["none_defaults"]),
        )
        for tool in described
    )
