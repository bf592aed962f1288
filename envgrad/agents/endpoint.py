"""What an agent is given: where its model answers, and the task."""

from __future__ import annotations

from dataclasses import dataclass, field

from envgrad.chat.template import content_text
from envgrad.errors import EnvgradError
from envgrad.types import Message

MODEL = "policy"
"""the one model that an episode's endpoint serves; requests may name any"""


class AgentTimeLimit(EnvgradError):
    """The agent's own time is up. ``run_agent`` may raise it: the episode ends as truncated, and its reward stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEndpoint:
    """One episode's own OpenAI-compatible endpoint, and the task that ``reset`` gave.

    Plain data: it may be sent to another process. The key opens this episode and no other, and only while it is played.

    Example:
        >>> endpoint = AgentEndpoint(base_url="http://127.0.0.1:9/episodes/1/v1", api_key="secret",
        ...     messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort a list."}))
        >>> endpoint.prompt
        'Sort a list.'
        >>> endpoint.environ["OPENAI_BASE_URL"]
        'http://127.0.0.1:9/episodes/1/v1'
    """

    base_url: str
    """ends with ``/v1``"""
    api_key: str = field(repr=False)
    """the bearer token"""
    messages: tuple[Message, ...]
    """the opening messages: what ``reset`` returned"""
    model: str = MODEL

    @property
    def prompt(self) -> str:
        """The last user message's text."""
        users = [message for message in self.messages if message.get("role") == "user"]
        return content_text(users[-1].get("content")) if users else ""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that OpenAI's clients and most agent programs read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
        }
