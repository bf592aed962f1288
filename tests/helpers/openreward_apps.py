"""OpenReward environments on the package's own server classes, as ASGI apps: run them with uvicorn."""

from __future__ import annotations

import json
import time

from openreward.environments import Environment, GroupScore, Server, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel


def said(text, **rest):
    return ToolOutput(blocks=[TextBlock(text=text)], **rest)


class Sum(BaseModel):
    value: int
    sure: bool | None = None


class Nothing(BaseModel):
    """No argument."""


class Sums(Environment):
    """Two numbers per task; submit their sum. The last task has a tool of its own, one is slow to set up."""

    live = 0
    most = 0

    @classmethod
    def list_splits(cls):
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split):
        return [{"a": index, "b": 3 if split == "train" else 50} for index in range(8)]

    def setup(self):
        type(self).live += 1
        type(self).most = max(type(self).most, type(self).live)
        if self.task_spec == {"a": 6, "b": 50}:
            time.sleep(1.0)

    def teardown(self):
        type(self).live -= 1

    def get_prompt(self):
        return [TextBlock(text=f"What is {self.task_spec['a']} + {self.task_spec['b']}?")]

    @tool
    def submit(self, answer: Sum) -> ToolOutput:
        """Submit the sum."""
        if answer.value == 666:
            raise RuntimeError("the judge has fainted")
        right = answer.value == self.task_spec["a"] + self.task_spec["b"]
        return said("right" if right else "wrong", reward=float(right), finished=True)

    @tool
    def peek(self, nothing: Nothing) -> ToolOutput:
        """Look around."""
        return said("nothing here", reward=0.25)

    @tool(shared=False)
    def hint(self, nothing: Nothing) -> ToolOutput:
        """Only in some sessions."""
        return said("it is ten")

    def list_task_tools(self):
        from openreward.environments import ListToolsOutput, ToolSpec

        schema = Nothing.model_json_schema()
        own = [ToolSpec(name="hint", description="A hint.", input_schema=schema)] if self.task_spec["a"] == 7 else []
        return ListToolsOutput(tools=own)


class Answer(BaseModel):
    text: str


def blocks_of(candidates):
    return [block for candidate in candidates for message in candidate.messages for block in message.blocks]


class Essay(Sums):
    """The model's answer is graded, and the siblings are compared by its length."""

    live = 0
    most = 0

    def list_task_tools(self):
        from openreward.environments import ListToolsOutput

        return ListToolsOutput(tools=[])

    @terminal
    @tool
    def grade(self, answer: Answer) -> ToolOutput:
        return said("thanks", reward=1.0 if "ten" in answer.text else 0.5, finished=True)

    async def score_group(self, candidates):
        if any("give up" in block.text for block in blocks_of(candidates) if block.type == "text"):
            raise RuntimeError("no comparison")
        answers = [[block for block in blocks_of([candidate]) if block.type == "text"] for candidate in candidates]
        return [GroupScore(reward=len(texts[-1].text) / 100 if texts else 0.0) for texts in answers]


def app(*kinds):
    """The server's ASGI app, and ``GET /counts`` beside it: sessions alive, and the most at once."""
    served = Server(list(kinds)).app

    async def with_counts(scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/counts":
            await served(scope, receive, send)
            return
        body = json.dumps({"live": sum(kind.live for kind in kinds), "most": max(kind.most for kind in kinds)}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return with_counts


sums = app(Sums)
essay = app(Essay)
both = app(Sums, Essay)
