"""Agents that own their loop, for tests: the starter's game played through an OpenAI client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai

from envgrad.agents import AgentEndpoint
from envgrad.environments.contract import inspect_environment
from envgrad.environments.tools import check_arguments, find_tool
from envgrad.errors import ToolCallError
from envgrad.starter.compass import Compass
from envgrad.types import Message

SPEC = inspect_environment("compass", Compass)[0]
SCHEMAS: list[Any] = [tool.schema for tool in SPEC.tools]


def client_of(endpoint: AgentEndpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def merged(chunks: Iterator[Any]) -> tuple[Message, str | None]:
    """An assistant message from the deltas of a stream, and its finish reason."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    message: Message = {"role": "assistant", "content": content or None}
    return (message | {"tool_calls": list(calls.values())} if calls else message), reason


class CompassAgent:
    """``Compass``, but the agent owns the loop. It does what the library's own loop does."""

    stream = False

    def __init__(self) -> None:
        self.game = Compass()

    def reset(self, seed: int, split: str = "train") -> str:
        return self.game.reset(seed, split)

    async def run_agent(self, endpoint: AgentEndpoint) -> None:
        messages: list[Any] = list(endpoint.messages)
        async with client_of(endpoint) as client:
            while not self.game.done:
                answer = await self.ask(client, messages)
                messages.append(answer)
                calls = answer.get("tool_calls") or []
                if not calls:
                    return
                for call in calls:
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": self.call(call["function"])}
                    )
                    if self.game.done:
                        return

    async def ask(self, client: openai.AsyncOpenAI, messages: list[Any]) -> Message:
        if not self.stream:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS)
            return answer.choices[0].message.model_dump()
        stream = await client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS, stream=True)
        return merged(iter([chunk async for chunk in stream]))[0]

    def call(self, function: dict[str, Any]) -> str:
        try:
            tool = find_tool(function["name"], SPEC.tools)
            return str(tool.bind(self.game)(**check_arguments(tool, json.loads(function["arguments"]))))
        except ToolCallError as error:
            return str(error)

    def get_reward(self) -> float:
        return self.game.get_reward()


class StreamingCompassAgent(CompassAgent):
    stream = True
