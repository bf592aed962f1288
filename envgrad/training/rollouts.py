"""All that plays episodes for a trainer: environments, renderer, sampler and runner, opened and closed together."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from envgrad.chat.renderer import ChatRenderer
from envgrad.config import RolloutConfig, round_size
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import EnvironmentSpec, inspect_environment
from envgrad.environments.pool import InstancePool
from envgrad.environments.tasks import TaskStream, build_task_stream
from envgrad.errors import ConfigurationError, EnvironmentContractError
from envgrad.rollout.context import EpisodeContext, EpisodeLimits
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.loop import RolloutLoop
from envgrad.rollout.runner import RolloutRunner
from envgrad.sampling.local import make_local_sampler
from envgrad.sampling.sampler import Sampler, SamplingParams
from envgrad.training.model import Policy

logger = logging.getLogger(__name__)

EnvironmentFactory: TypeAlias = Callable[[], object]

LEAST_CONCURRENCY = 64
"""episodes in flight where the user sets no bound: a small training batch must not make evaluation crawl"""


@dataclass(slots=True)
class _Open:
    """What is alive between opening and closing."""

    sampler: Sampler
    runner: RolloutRunner
    depth: int = 1


def _close_probes(probes: dict[str, object], specs: Mapping[str, EnvironmentSpec], close_timeout: float) -> None:
    """Close probe instances that no pool took over. Safe to call twice."""
    while probes:
        name, probe = probes.popitem()
        InstancePool(specs[name], probe, limit=1, workers=WorkerPool(1), close_timeout=close_timeout).close_now()


class Rollouts:
    """Inspects the environments at construction; ``open()`` starts what plays, and closes it on every way out.

    Raises:
        ConfigurationError: no environment, an environment that breaks the contract, a template that cannot be used.
    """

    def __init__(
        self,
        policy: Policy,
        config: RolloutConfig,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None,
    ) -> None:
        self.policy = policy
        self.config = config
        self.specs: dict[str, EnvironmentSpec] = {}
        self._probes: dict[str, object] = {}
        self._finalizer = weakref.finalize(self, _close_probes, self._probes, self.specs, config.close_timeout)
        self._open: _Open | None = None
        self._version = 0
        self._routed = isinstance(environment_factory, Mapping)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._inspect(environment_factory)
            self.train_tasks()
            self.renderer = self._make_renderer()
            undo.pop_all()

    def _inspect(self, environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None) -> None:
        if environment_factory is None:
            raise ConfigurationError(
                "nothing to learn from: pass environment_factory=YourEnvironment, a class with reset() and get_reward()"
            )
        if isinstance(environment_factory, Mapping):
            factories = dict(environment_factory)
            if not factories:
                raise ConfigurationError("environment_factory={} names no environment; give {name: class}")
        else:
            name = getattr(environment_factory, "__name__", type(environment_factory).__name__)
            factories = {name if name.isidentifier() else "environment": environment_factory}
        for name, factory in factories.items():
            spec, probe = inspect_environment(name, factory, columns=frozenset(), routed=self._routed)
            self.specs[name] = spec
            self._probes[name] = probe
            if not spec.may_reward:
                raise EnvironmentContractError(
                    f"{name} has no reward source: define get_reward(self) -> float, or pay from step or tools"
                )

    def _make_renderer(self) -> ChatRenderer:
        config = self.config
        generation_config = self.policy.base.generation_config
        eos = generation_config.eos_token_id if generation_config is not None else None
        renderer = ChatRenderer(
            self.policy.tokenizer,
            chat_template=config.chat_template,
            chat_template_kwargs=config.mapping("chat_template_kwargs"),
            tool_parser=config.tool_parser,
            eos_token_ids=[eos] if isinstance(eos, int) else eos or [],
        )
        for spec in self.specs.values():
            renderer.check([tool.schema for tool in spec.tools] or None)
        return renderer

    # -- tasks

    def train_tasks(self) -> TaskStream:
        """The training tasks from their beginning."""
        weights = self.config.mapping("environment_weights")
        return build_task_stream(self.specs, seed=self.config.seed, split="train", weights=weights, routed=self._routed)

    def eval_tasks(self) -> TaskStream:
        """The evaluation tasks from their beginning; their ids never meet the training ids."""
        weights = self.config.mapping("environment_weights")
        return build_task_stream(
            self.specs, seed=self.config.seed, split="eval", weights=weights, shuffle=False, routed=self._routed
        )

    def group_policy(self, num_generations: int) -> GroupPolicy:
        return GroupPolicy(
            num_generations=num_generations,
            max_groups=self._max_groups(num_generations),
            max_episode_retries=self.config.max_episode_retries,
            group_consistency=self.config.group_consistency,
        )

    def _concurrency(self) -> int:
        return self.config.max_concurrent_episodes or max(round_size(self.config), LEAST_CONCURRENCY)

    def _max_groups(self, num_generations: int) -> int:
        return max(1, self._concurrency() // num_generations)

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
        sizes = (config.num_generations, config.num_generations_eval or 1)
        sampler = make_local_sampler(
            self.policy.base,
            max_sessions=max(self._concurrency(), *sizes),
            max_context=config.max_context,
            max_kv_tokens=config.max_kv_tokens,
            deterministic=config.deterministic,
            tokenizer=self.policy.tokenizer,
            autocast=torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None,
        )
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
        )
        return _Open(sampler=sampler, runner=runner)

    def _context(self, spec: EnvironmentSpec, sampler: Sampler, workers: WorkerPool) -> EpisodeContext:
        config = self.config
        return EpisodeContext(
            spec=spec,
            renderer=self.renderer,
            sampler=sampler,
            workers=workers,
            sampling=SamplingParams(
                max_tokens=1,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p or 0.0,
                repetition_penalty=config.repetition_penalty,
                stop_token_ids=tuple(self.renderer.stop_token_ids),
                stop_strings=tuple(config.stop_strings or ()),
            ),
            limits=EpisodeLimits(
                max_completion_length=config.max_completion_length,
                max_context=sampler.max_context,
                max_turns=config.max_turns,
                max_turn_tokens=config.max_turn_tokens,
                episode_timeout=config.episode_timeout,
                tool_timeout=config.tool_timeout,
                reset_timeout=config.reset_timeout,
                reward_timeout=config.reward_timeout,
            ),
        )

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
