"""All that plays episodes for a trainer: environments, renderer, sampler and runner, opened and closed together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from envgrad.config import RolloutConfig
from envgrad.config.mixture import EnvironmentOptions
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import EnvironmentSpec, inspect_environment
from envgrad.environments.isolation import Isolation
from envgrad.environments.pool import InstancePool
from envgrad.rollout.activity import Activity
from envgrad.rollout.context import CustomRollout, EpisodeContext, EpisodeLimits
from envgrad.rollout.loop import RolloutLoop
from envgrad.rollout.runner import RolloutRunner
from envgrad.sampling.local import make_local_sampler
from envgrad.sampling.sampler import Sampler, SamplingParams
from envgrad.training.inputs import UserInputs
from envgrad.training.model import Policy
from envgrad.training.plan import RolloutPlan

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """What is alive between opening and closing."""

    sampler: Sampler
    runner: RolloutRunner
    depth: int = 1


class Rollouts(RolloutPlan):
    """The plan, and what plays it: ``open()`` starts that, and closes it on every way out."""

    def __init__(
        self, policy: Policy | None, config: RolloutConfig, inputs: UserInputs, trainer: RolloutTrainer | None = None
    ) -> None:
        self._open: _Open | None = None
        self._version = 0
        self.activity = Activity()
        super().__init__(policy, config, inputs, trainer)

    # -- life

    @contextlib.contextmanager
    def open(self) -> Iterator[RolloutRunner]:
        """The runner, started if it is not; what was started here is closed on leaving, whatever happened."""
        if self._open is not None:
            self._open.depth += 1
        else:
            self._open = self._start()
        try:
            yield self._open.runner
        finally:
            self._open.depth -= 1
            if not self._open.depth:
                self.close()

    def _start(self) -> _Open:
        with contextlib.ExitStack() as undo:  # what was started is closed if the rest cannot be
            opened = self._start_all(undo)
            undo.pop_all()
        return opened

    def _start_all(self, undo: contextlib.ExitStack) -> _Open:
        config = self.config
        self.activity.take()  # of what was sampled outside of rounds
        sizes = {config.num_generations, config.num_generations_eval or 1}
        sizes |= {options.num_generations for options in self.options.values()}
        sampler = self._make_sampler(max(self._concurrency(), *sizes))
        undo.callback(sampler.close)
        sampler.update_weights(self._version, None)
        workers = WorkerPool()
        undo.callback(workers.close)
        # Each group has its siblings and a pristine copy; one group more, for instances that are being replaced.
        limit = max((self._max_groups(size) + 1) * (size + 1) for size in sizes)
        contexts, pools = {}, {}
        for name, spec in self.specs.items():
            contexts[name] = self._context(spec, sampler, workers)
            probe = self._probes.pop(name) if name in self._probes else inspect_environment(name, spec.factory)[1]
            pools[name] = InstancePool(spec, probe, limit=limit, workers=workers, close_timeout=config.close_timeout)
            undo.callback(pools[name].close_now)
        runner = RolloutRunner(
            contexts=contexts,
            pools=pools,
            workers=workers,
            loop=RolloutLoop(),
            max_groups=self._max_groups(config.num_generations),
            max_consecutive_failed_groups=config.max_consecutive_failed_groups,
            in_waves=config.deterministic,
            activity=self.activity,
        )
        return _Open(sampler=sampler, runner=runner)

    def _make_sampler(self, max_sessions: int) -> Sampler:
        config = self.config
        return make_local_sampler(
            self.policy.base,
            max_sessions=max_sessions,
            max_context=config.max_context,
            max_kv_tokens=config.max_kv_tokens,
            deterministic=config.deterministic,
            tokenizer=self.policy.tokenizer,
            autocast=torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None,
            activity=self.activity,
        )

    def _context(self, spec: EnvironmentSpec, sampler: Sampler, workers: WorkerPool) -> EpisodeContext:
        config = self.config
        options = self.options.get(spec.name) or EnvironmentOptions.of_run(config)
        return EpisodeContext(
            spec=spec,
            renderer=self.renderer,
            sampler=sampler,
            workers=workers,
            isolation=Isolation(config.isolate_generators),
            ask_feedback=self._asks_feedback(),
            reward_sources=self.reward_sources,
            reward_weights=self.reward_weights,
            rollout_func=self._custom_rollout(),
            vocab_size=None if self._policy is None else self._policy.vocab_size,
            activity=self.activity,
            sampling=SamplingParams(
                max_tokens=1,
                temperature=options.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p or 0.0,
                repetition_penalty=config.repetition_penalty,
                stop_token_ids=tuple(self.renderer.stop_token_ids),
                stop_strings=tuple(config.stop_strings or ()),
            ),
            limits=EpisodeLimits(
                max_completion_length=options.max_completion_length,
                max_context=sampler.max_context,
                max_turns=options.max_turns,
                max_turn_tokens=options.max_turn_tokens,
                episode_timeout=options.episode_timeout,
                tool_timeout=options.tool_timeout,
                reset_timeout=config.reset_timeout,
                reward_timeout=config.reward_timeout,
            ),
        )

    def _custom_rollout(self) -> CustomRollout | None:
        function, trainer = self.inputs.rollout_func, self._trainer
        if function is None:
            return None
        if trainer is None:
            raise AssertionError("a rollout_func needs its trainer")
        return lambda prompts: function(prompts, trainer)

    def publish(self, version: int) -> None:
        """Let the sampler serve policy ``version``, which is the trainer's module as it is now."""
        self._version = version
        if self._open is not None and self._open.sampler.policy_version != version:
            self._open.sampler.update_weights(version, None)

    @property
    def sampler(self) -> Sampler:
        if self._open is None:
            raise AssertionError("the rollouts are not open")
        return self._open.sampler

    def close(self) -> None:
        """Close the sampler and every instance exactly once. Safe to call twice."""
        opened, self._open = self._open, None
        try:
            if opened is not None:
                opened.runner.close()
        finally:
            if opened is not None:
                opened.sampler.close()
            self._finalizer()
