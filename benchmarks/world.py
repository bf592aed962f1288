"""The environment and the prompts that both sides play: the same class, the same rows."""

from __future__ import annotations

import itertools
import time
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .workloads import Workload

RESULT = "north door, east river, a key on the table"
"""what the tool always answers"""

_draws = itertools.count(1)


class Room:
    """Scores anything, differently each time, so that there is something to learn from in every group."""

    def reset(self, index: int, **kwargs: Any) -> None:
        """The row's prompt stands as it is."""

    def get_reward(self) -> float:
        return next(_draws) * 0.6180339887 % 1.0


class ToolRoom(Room):
    """A room with one tool."""

    seconds = 0.0

    def look(self) -> str:
        """
        Look around.

        Returns:
            What there is to see.
        """
        if self.seconds:
            time.sleep(self.seconds)
        return RESULT


def room_of(workload: Workload) -> type[Room]:
    """The environment's class; one turn needs no tool."""
    if not workload.most_calls:
        return Room
    return type("ToolRoom", (ToolRoom,), {"seconds": workload.tool_seconds})


def rows_of(workload: Workload, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """One row for each group; its prompt has about ``prompt_tokens`` tokens with all that the template adds.

    The tool's schema is a few dozen tokens of a small vocabulary; it counts as part of the prompt.
    """
    overhead = _length(tokenizer, "", workload)
    prompts = []
    for index in range(workload.groups):
        text = f"Room {index}. "
        while overhead + len(tokenizer.encode(text, add_special_tokens=False)) < workload.prompt_tokens:
            text += f"door {len(text) % 97} leads to the garden and box {len(text) % 89} to the river; "
        prompts.append([{"role": "user", "content": _cut(tokenizer, text, workload.prompt_tokens - overhead)}])
    return Dataset.from_dict({"prompt": prompts, "index": list(range(workload.groups))})


def _length(tokenizer: PreTrainedTokenizerBase, content: str, workload: Workload) -> int:
    tools = [room_of(workload)().look] if workload.most_calls else None  # type: ignore[attr-defined]
    chat = [{"role": "user", "content": content}]
    ids = tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"]
    return len(ids)


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)[: max(1, tokens)]
    return str(tokenizer.decode(ids))
