"""trl's side: its trainer as users get it, but for a logits processor that keeps to the workload's table of lengths.

The processor lets no row end before its length and ends it there, by one write to each step's scores. A parser that
takes any text for a call replaces trl's, which costs less than parsing. Nothing else of trl is touched.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from .models import NO_CALL, load
from .side import Counts, Side, trainer_options
from .workloads import Workload
from .world import room_of, rows_of

VERSION = "1.16.0"


class FixedLengths(LogitsProcessor):  # type: ignore[misc]
    """Row ``i`` ends with ``ends[i]`` as its token number ``lengths[i]``, and not before."""

    def __init__(self, lengths: list[int], ends: list[int], forbidden: list[int]) -> None:
        self._at: dict[int, list[tuple[int, int]]] = {}
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            self._at.setdefault(length - 1, []).append((row, end))
        self._forbidden = forbidden
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self._forbidden] = float("-inf")
        for row, end in self._at.get(self._step, ()):
            scores[row] = float("-inf")
            scores[row, end] = 0.0
        self._step += 1
        return scores


class _Script:
    """Which rows and turns a call of ``generate`` is about: those that have turns left, in order."""

    def __init__(self, workload: Workload, *, end: int, no_call: int) -> None:
        self._plan = workload.plan()
        self.end, self.no_call = end, no_call
        self.turn = 0

    def processor(self) -> FixedLengths:
        rows = [turns for turns in self._plan if len(turns) > self.turn]
        lengths = [turns[self.turn] for turns in rows]
        ends = [self.no_call if len(turns) == self.turn + 1 else self.end for turns in rows]
        self.turn += 1
        return FixedLengths(lengths, ends, [self.end, self.no_call])


def build(workload: Workload, folder: Path, output: Path, splits: int = 1) -> Side:
    """A trainer that makes one optimizer step of ``workload`` after the other, each in ``splits`` micro-batches.

    Raises:
        RuntimeError: another version of trl is installed.
    """
    import trl
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    if trl.__version__ != VERSION:
        raise RuntimeError(f"trl {trl.__version__} is installed; the comparison is with {VERSION}")
    model, tokenizer = load(folder)
    script = _Script(workload, end=tokenizer.eos_token_id, no_call=tokenizer.convert_tokens_to_ids(NO_CALL))
    model.generation_config.eos_token_id = [script.end, script.no_call]
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {}}  # not used, but asked for
    options = trainer_options(workload, output, splits)
    if workload.most_calls:
        options["max_tool_calling_iterations"] = workload.most_calls
    grpo_trainer.parse_response = lambda tokenizer, ids, **kwargs: _read(tokenizer, ids, script.no_call)
    trainer = GRPOTrainer(
        model, args=GRPOConfig(**options), train_dataset=rows_of(workload, tokenizer), processing_class=tokenizer,
        environment_factory=room_of(workload),
    )  # fmt: skip
    side = Side(trainer=trainer, options=options, version=f"trl {trl.__version__}")
    _hook(trainer, model, script, side)
    return side


def _read(tokenizer: Any, ids: list[int], no_call: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    if ids[-1] != no_call:
        message["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    return message


def _hook(trainer: Any, model: Any, script: _Script, side: Side) -> None:
    """Put the processor into every ``generate``, and the clock and the counters around what makes a batch."""
    generate, play, collect = model.generate, trainer._generate_and_score_completions, trainer._generate

    def scripted(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, logits_processor=LogitsProcessorList([script.processor()]), **kwargs)

    def timed(inputs: Any) -> Any:
        script.turn = 0
        began = time.perf_counter()
        found = play(inputs)
        side.rollout_seconds += time.perf_counter() - began
        return found

    def counted(prompts: Any) -> Any:
        found = collect(prompts)
        prompt_ids, completion_ids, tool_mask = found[:3]
        masks = tool_mask or [[1] * len(ids) for ids in completion_ids]
        sampled = tuple(sum(mask) for mask in masks)
        side.counts = Counts(
            prompt=tuple(len(ids) for ids in prompt_ids),
            sampled=sampled,
            given=tuple(len(ids) - own for ids, own in zip(completion_ids, sampled, strict=True)),
            calls=round(trainer._metrics["train"]["tools/call_frequency"][-1] * len(masks)) if tool_mask else 0,
        )
        return found

    model.generate = torch.no_grad()(scripted)
    trainer._generate_and_score_completions = timed
    trainer._generate = counted
