"""Chats as tokens: templates rendered append-only, and sampled text read as tool calls."""

from __future__ import annotations

from .renderer import ChatRenderer
from .tool_calls import SampledTurn, ToolParser

__all__ = ["ChatRenderer", "SampledTurn", "ToolParser"]
