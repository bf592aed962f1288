"""How an episode begins: an instance is reset, and its first messages and tools become the opening prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envgrad.environments.arguments import clean_text
from envgrad.environments.boundary import Raised, call_user
from envgrad.environments.contract import opening_messages
from envgrad.environments.isolation import Stream
from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvironmentContractError, ResetTimeout
from envgrad.rollout.context import EpisodeContext, value_or_failure
from envgrad.types import Message, Prompt, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A reset instance's first messages, its tools, and both as token ids."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    schemas: list[dict[str, Any]] | None
    """the tools' schemas as the template gets them; None without tools"""
    prompt_ids: tuple[int, ...]
    plain_prompt: str | None = None
    """the prompt, where it is plain text for a model without a chat; None in a chat"""


@dataclass(slots=True)
class EpisodeStart:
    """A started instance. ``usable`` turns False once one of its calls may still be running in a thread."""

    instance: object
    opening: Opening
    reset_seconds: float = 0.0
    usable: bool = True
    stopped_calls: int = 0
    """calls of tools or ``step`` that ran past their limit"""
    stream: Stream | None = None
    """the global random generators as this instance sees them; None where it does not draw from them"""


async def start(context: EpisodeContext, instance: object, task: Task, known: Opening | None = None) -> EpisodeStart:
    """Reset ``instance`` to ``task`` and render its opening; ``known`` saves rendering the same opening again.

    Raises:
        EpisodeFailure: ``reset`` raised, took too long, or returned what is no prompt.
    """
    spec, limits = context.spec, context.limits
    reset: Callable[..., object] = instance.reset  # type: ignore[attr-defined]
    arguments = spec.reset_arguments(task)
    outcome = await call_user(
        f"{spec.name}.reset", reset, workers=context.workers, timeout=limits.reset_timeout, arguments=arguments
    )
    value = value_or_failure(outcome, f"{spec.name}.reset", ResetTimeout, limits.reset_timeout)
    opening = await open_prompt(context, instance, value, task, known)
    return EpisodeStart(instance=instance, opening=opening, reset_seconds=outcome.seconds)


async def open_prompt(
    context: EpisodeContext, instance: object, reset_result: object, task: Task, known: Opening | None = None
) -> Opening:
    """The opening of an instance that was reset; ``known`` is taken if it says the same."""
    row_prompt: Prompt = task.row.get("prompt") if task.row else None
    if context.spec.stateless and not context.spec.tools and isinstance(row_prompt, str):
        return _open_text(context, clean_text(row_prompt), known)
    messages = tuple(_clean(m) for m in opening_messages(reset_result, row_prompt, f"{context.spec.name}.reset"))
    tools = context.spec.tools if not context.spec.dynamic_tools else await _read_tools(context, instance)
    if known is not None and known.messages == messages and known.tools == tools:
        return known
    schemas = [tool.schema for tool in tools] or None
    prompt_ids = context.renderer.open(messages, schemas)
    return Opening(messages=messages, tools=tools, schemas=schemas, prompt_ids=tuple(prompt_ids))


def _open_text(context: EpisodeContext, prompt: str, known: Opening | None) -> Opening:
    """A prompt that is text and nothing else stays so: no template is put around it."""
    if known is not None and known.plain_prompt == prompt:
        return known
    return Opening(
        messages=({"role": "user", "content": prompt},),
        tools=(),
        schemas=None,
        prompt_ids=tuple(context.renderer.open_text(prompt)),
        plain_prompt=prompt,
    )


def _clean(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": clean_text(content)} if isinstance(content, str) else message


async def _read_tools(context: EpisodeContext, instance: object) -> tuple[ToolSpec, ...]:
    """The tools of this task: a property of the user's, so it is read inside the boundary."""
    where, timeout = f"{context.spec.name}.tools", context.limits.reset_timeout
    outcome = await call_user(where, context.spec.tools_of, instance, workers=context.workers, timeout=timeout)
    if isinstance(outcome, Raised) and isinstance(outcome.error, EnvironmentContractError):
        raise outcome.error
    tools = value_or_failure(outcome, where, ResetTimeout, timeout)
    if not isinstance(tools, tuple):
        raise AssertionError(tools)
    return tools
