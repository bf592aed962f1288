"""What a rollout needs of a renderer: chats become rows of ids that only grow, and sampled ids become messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import Message
from .template import ToolSchemas
from .tool_calls import SampledTurn


class Renderer(Protocol):
    """``ChatRenderer`` for models whose token ids we see; ``EndpointRenderer`` for those behind a chat endpoint."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        ...

    def check(self, tools: ToolSchemas) -> None:
        """Make sure that a tool round can be rendered.

        Raises:
            ChatTemplateError: it cannot.
        """
        ...

    def open(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Ids of the opening prompt, up to where the model answers."""
        ...

    def open_text(self, text: str) -> list[int]:
        """Ids of a prompt that is plain text."""
        ...

    def suffix(self, turn_ids: Sequence[int], results: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Ids that follow a sampled turn: what is missing of its end, the results, and the next generation prompt."""
        ...

    def read(self, token_ids: Sequence[int], tools: ToolSchemas, *, turn: int = 0) -> SampledTurn:
        """What a sampled turn says: never raises, whatever was sampled."""
        ...

    def read_text(self, token_ids: Sequence[int]) -> SampledTurn:
        """What was sampled behind plain text."""
        ...
