"""envgrad's side: its trainer as users get it, but for a sampler that keeps to the workload's table of lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.sampling.sampler import Completion, Sampler, SamplingParams, Session
from envgrad.training.rollouts import Rollouts
from envgrad.types import ToolCall

from .models import NO_CALL, load
from .side import Counts, Side, trainer_options
from .workloads import Workload
from .world import room_of, rows_of

FILLER = 100
"""an ordinary token of every model here"""


class FixedTurns:
    """A sampler whose turns have given lengths: each ends, at its length, with the token that its place calls for.

    The model samples all tokens but the last, which is replaced: forwarding it is the next turn's work on both sides.
    """

    def __init__(self, inner: Sampler, workload: Workload, *, end: int, no_call: int) -> None:
        self.inner = inner
        self._plan = workload.plan()
        self._groups, self._siblings = workload.groups, workload.siblings
        self._end, self._no_call = end, no_call
        self._turns: dict[str, int] = {}

    @property
    def policy_version(self) -> int:
        return self.inner.policy_version

    @property
    def max_context(self) -> int:
        return self.inner.max_context

    @property
    def exact_logprobs(self) -> bool:
        return self.inner.exact_logprobs

    def begin(self, session: Session) -> None:
        self._turns[session.key] = 0
        self.inner.begin(session)

    def end(self, session: Session) -> None:
        self._turns.pop(session.key, None)
        self.inner.end(session)

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session: Session) -> Completion:
        position, sibling, _ = session.order
        turns = self._plan[position % self._groups * self._siblings + sibling]
        turn = self._turns[session.key]
        self._turns[session.key] = turn + 1
        fixed = replace(params, max_tokens=turns[turn], stop_token_ids=(), stop_strings=())
        sampled = await self.inner.sample(prompt_ids, fixed, session)
        last = self._no_call if turn + 1 == len(turns) else self._end
        return replace(sampled, token_ids=self._ended(sampled.token_ids, last), stop_reason="stop")

    def _ended(self, token_ids: Sequence[int], last: int) -> tuple[int, ...]:
        """The turn with ``last`` as its end. Ends that the model happened to sample right before would be read as the
        turn's own; another token stands for them (trl's processor forbids them)."""
        kept = list(token_ids[:-1])
        for index in range(len(kept) - 1, -1, -1):
            if kept[index] not in (self._end, self._no_call):
                break
            kept[index] = FILLER
        return (*kept, last)

    def update_weights(self, version: int, named_tensors: Mapping[str, Tensor] | None) -> None:
        self.inner.update_weights(version, named_tensors)

    def close(self) -> None:
        self.inner.close()


def _read_call(text: str) -> tuple[Sequence[ToolCall], str]:
    """Any text is a call, unless it ends with the token that says it is none."""
    if text.endswith(NO_CALL):
        return (), text
    return (ToolCall(id="c0", name="look", arguments={}),), text


def build(workload: Workload, folder: Path, output: Path) -> Side:
    """A trainer that makes one optimizer step of ``workload`` after the other."""
    model, tokenizer = load(folder)
    chosen = trainer_options(workload, output) | {"log_episodes": False, "tool_parser": _read_call}
    options = dict(chosen)
    inner_sampler = Rollouts._make_sampler

    def make_sampler(self: Rollouts, max_sessions: int) -> FixedTurns:
        ends = {"end": tokenizer.eos_token_id, "no_call": tokenizer.convert_tokens_to_ids(NO_CALL)}
        return FixedTurns(inner_sampler(self, max_sessions), workload, **ends)

    Rollouts._make_sampler = make_sampler  # type: ignore[method-assign]
    trainer = GRPOTrainer(
        model, args=GRPOConfig(**options), train_dataset=rows_of(workload, tokenizer), processing_class=tokenizer,
        environment_factory=room_of(workload),
    )  # fmt: skip
    side = Side(trainer=trainer, options=chosen, version="envgrad")
    inner_batch, inner_step = trainer.get_batch_samples, trainer.training_step

    def get_batch(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = inner_batch(*args, **kwargs)
        side.rollout_seconds += time.perf_counter() - began
        return found

    def training_step(model: Any, inputs: Any, *args: Any) -> Any:
        side.forwarded["training"] = inputs.batch.num_forwarded_tokens
        if inputs.played is not None:
            side.forwarded["rollout"] = inputs.played.activity.forwarded_tokens
            side.counts = _count(inputs.played.groups)
        return inner_step(model, inputs, *args)

    trainer.get_batch_samples = get_batch  # type: ignore[method-assign]
    trainer.training_step = training_step  # type: ignore[method-assign]
    return side


def _count(groups: Sequence[Any]) -> Counts:
    episodes = [episode for group in groups for episode in group.episodes]
    return Counts(
        prompt=tuple(episode.prompt_length for episode in episodes),
        sampled=tuple(episode.num_sampled_tokens for episode in episodes),
        given=tuple(len(one.token_ids) - one.prompt_length - one.num_sampled_tokens for one in episodes),
        calls=sum(len(turn.outcomes) for episode in episodes for turn in episode.turns),
    )
