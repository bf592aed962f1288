"""All that plays episodes for a trainer: environments, renderer, sampler and runner, opened and closed together."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from envgrad.config import RolloutConfig
from envgrad.config.mixture import EnvironmentOptions
from envgrad.cores import is_small
from envgrad.distributed.absent import AbsentSampler
from envgrad.distributed.sharded import WholeWeights, here, is_cut
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import EnvironmentSpec, inspect_environment
from envgrad.environments.isolation import Isolation
from envgrad.environments.pool import InstancePool
from envgrad.errors import EnvironmentFailure
from envgrad.rollout.activity import Activity
from envgrad.rollout.context import AgentHost, CustomRollout, EpisodeContext, EpisodeLimits
from envgrad.rollout.loop import RolloutLoop
from envgrad.rollout.runner import RolloutRunner
from envgrad.rollout.tally import Tally
from envgrad.sampling.local import make_local_sampler
from envgrad.sampling.replicas import ReplicaSampler
from envgrad.sampling.sampler import Sampler, SamplingParams
from envgrad.sampling.vllm import VLLMSampler
from envgrad.training.inputs import UserInputs
from envgrad.training.model import Policy
from envgrad.training.plan import RolloutPlan
from envgrad.training.together import cuts_weights, shared_waves, with_absent
from envgrad.training.vllm import make_vllm_sampler
from envgrad.training.weights import adapter_weights, frozen_copy, module_weights, policy_weights

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer

logger = logging.getLogger(__name__)

LEAST_BUILD_SECONDS = 60.0
"""a factory has ``reset_timeout`` seconds, and these at the least: it may load more than a reset does"""


class LocalOptions(TypedDict):
    """What a local sampler is made with, in this process or in one of its own."""

    max_sessions: int
    max_context: int | None
    max_kv_tokens: int | None
    deterministic: bool
    tokenizer: PreTrainedTokenizerBase | None
    autocast: torch.dtype | None
    activity: Activity


@dataclass(slots=True)
class _Open:
    """What is alive between opening and closing."""

    sampler: Sampler
    runner: RolloutRunner
    depth: int = 0


class Rollouts(RolloutPlan):
    """The plan, and what plays it: ``open()`` starts that, and closes it on every way out."""

    def __init__(
        self, policy: Policy | None, config: RolloutConfig, inputs: UserInputs, trainer: RolloutTrainer | None = None
    ) -> None:
        self._open: _Open | None = None
        self._life = threading.RLock()
        self._version = 0
        self._served: tuple[object, ...] = ()
        self._copy: PreTrainedModel | None = None
        self.activity = Activity()
        self.installing: int | None = None
        """the version whose weights the sampler is taking over now"""
        self._told: list[str] = []
        self.tally = Tally()
        """what went wrong in training, from the trainer's construction on"""
        self._agents: AgentHost | None = None
        self.waves = None if trainer is None else shared_waves(trainer, config)
        """who plays with this process"""
        super().__init__(policy, config, inputs, trainer)

    # -- life

    @contextlib.contextmanager
    def open(self) -> Iterator[RolloutRunner]:
        """The runner, started if it is not; who leaves last closes it, whatever happened. From any thread."""
        with self._life:
            if self._open is None:
                self._open = self._start()
            opened = self._open
            opened.depth += 1
        try:
            yield opened.runner
        finally:
            with self._life:
                opened.depth -= 1
                if not opened.depth and opened is self._open:
                    self.close()

    def _start(self) -> _Open:
        with contextlib.ExitStack() as undo:  # what was started is closed if the rest cannot be
            opened = self._start_all(undo)
            undo.pop_all()
        return opened

    def _start_all(self, undo: contextlib.ExitStack) -> _Open:
        config = self.config
        self.activity.take()  # of what was sampled outside of rounds
        undo.callback(self._close_unused)
        sizes = {config.num_generations, config.num_generations_eval or 1}
        sizes |= {options.num_generations for options in self.options.values()}
        make = partial(self._make_sampler, max(self._concurrency(), *sizes))
        sampler = make() if self._trainer is None else with_absent(self._trainer, make)
        undo.callback(sampler.close)
        if config.sampler == "process":  # it has started with the weights of now
            self._served = self._stamp()
        else:
            self._serve(sampler, self._version)
        workers = WorkerPool()
        undo.callback(workers.close)
        # Each group has its siblings and a pristine copy; one group more, for instances that are being replaced.
        limit = max((self._max_groups(size) + 1) * (size + 1) for size in sizes)
        if config.staleness:  # evaluation plays its groups beside those of training
            limit *= 2
        self._agents = self._make_agent_host()
        contexts, pools = {}, {}
        for name, spec in self.specs.items():
            contexts[name] = self._context(spec, sampler, workers)
            probe = self._probes.pop(name) if name in self._probes else inspect_environment(name, spec.factory)[1]
            pools[name] = InstancePool(
                spec,
                probe,
                limit=limit,
                workers=workers,
                close_timeout=self.close_timeout,
                state_timeout=config.reset_timeout,
                build_timeout=self._build_timeout(),
            )
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
            tally=self.tally,
            waves=self.waves,
        )
        return _Open(sampler=sampler, runner=runner)

    def _build_timeout(self) -> float | None:
        """Seconds that a factory may take."""
        timeout = self.config.reset_timeout
        if timeout is None or self.config.environment_executor == "ray":  # which waits for room, and has a limit for it
            return None
        return max(timeout, LEAST_BUILD_SECONDS)

    def _make_sampler(self, max_sessions: int) -> Sampler:
        """Who samples. A sampler of another kind is one more branch here, and one in ``_tensors_for``."""
        config = self.config
        options = LocalOptions(
            max_sessions=max_sessions,
            max_context=config.max_context,
            max_kv_tokens=config.max_kv_tokens,
            deterministic=config.deterministic,
            tokenizer=self.policy.tokenizer,
            autocast=torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None,
            activity=self.activity,
        )
        if config.sampler == "vllm":
            return make_vllm_sampler(config, self.policy)
        if config.sampler == "process":
            from envgrad.sampling.process import make_process_sampler
            from envgrad.sampling.process_model import sendable_tokenizer

            if not config.stop_strings:
                options["tokenizer"] = sendable_tokenizer(self.policy.tokenizer)
            processes = config.sampler_processes
            share = 1 if is_small(self.policy.base.parameters()) else max(1, torch.get_num_threads() // processes)
            make = partial(
                make_process_sampler,
                self.policy.base,
                weights=policy_weights(self.policy),
                version=self._version,
                threads=config.sampler_threads or share,
                update_timeout=config.weight_sync_timeout,
                **options,
            )
            return make() if processes == 1 else ReplicaSampler(make, processes, by_position=config.deterministic)
        beside = config.staleness > 0 and is_small(self.policy.base.parameters())  # the other cores are the trainer's
        return make_local_sampler(
            self._sampled_module(), update_timeout=config.weight_sync_timeout, threads=1 if beside else None, **options
        )

    def _sampled_module(self) -> PreTrainedModel:
        """The trainer's module, or, where sampling goes on beside training, a copy with weights of its own."""
        if not self.config.asynchronous and not self._is_cut:
            return self.policy.base
        if self._copy is None:
            self._copy = frozen_copy(self.policy)
        return self._copy

    @property
    def _is_cut(self) -> bool:
        """Whether no process has the policy's weights whole, or will not when training begins."""
        return self._trainer is not None and cuts_weights(self._trainer)

    def _make_agent_host(self) -> AgentHost | None:
        """The server that agents ask, if an environment has one; it starts with the first episode."""
        if not any(spec.runs_agent for spec in self.specs.values()):
            return None
        from envgrad.agents.host import LoopbackHost

        return LoopbackHost()

    def _context(self, spec: EnvironmentSpec, sampler: Sampler, workers: WorkerPool) -> EpisodeContext:
        config = self.config
        options = self.options.get(spec.name) or EnvironmentOptions.of_run(config)
        return EpisodeContext(
            spec=spec,
            renderer=self.renderer,
            sampler=sampler,
            workers=workers,
            isolation=Isolation(spec.isolation_mode(config.isolate_generators)),
            ask_feedback=self._asks_feedback(),
            reward_sources=self.reward_sources,
            reward_weights=self.reward_weights,
            rollout_func=self._custom_rollout(),
            agents=self._agents if spec.runs_agent else None,
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
        """Let the sampler serve policy ``version``, which is the trainer's module as it is now.

        Raises:
            SamplerFailure: it has not taken the weights over within ``weight_sync_timeout``.
            Exception: what hindered it. The sampler keeps the version that it had.
        """
        self._version = version
        if self._open is None:
            return
        # The same step again may have other weights: a checkpoint of it was loaded since.
        if self._open.sampler.policy_version != version or self._served != self._stamp():
            self._serve(self._open.sampler, version)

    def _serve(self, sampler: Sampler, version: int) -> None:
        served = self._stamp()
        weights = self._tensors_for(sampler)
        if weights is not None and self._is_cut and is_cut(weights):
            weights = {name: tensor.clone() for name, tensor in WholeWeights(weights).items()}
        self.installing = version
        try:
            sampler.update_weights(version, weights)
        finally:
            self.installing = None
        self._served = served

    def _stamp(self) -> tuple[object, ...]:
        """Differs from an earlier one where weights were replaced, or written to by anything but a fused optimizer."""
        if self._policy is None:
            return ()
        weights = [here(one) for one in self._policy.base.parameters()]
        return tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in weights)

    def _tell(self) -> None:
        """Say in the log what went wrong, if anything did, and once."""
        lines = [] if self.tally.is_clean else self.tally.lines()
        if lines != self._told:
            self._told = lines
            logger.warning("failures of this run: %s", "; ".join(lines))

    def _tensors_for(self, sampler: Sampler) -> Mapping[str, Tensor] | None:
        """What the sampler is given of the policy: nothing if it reads the trainer's module itself."""
        if self._policy is None:
            return None
        if isinstance(sampler, (VLLMSampler, AbsentSampler)) and sampler.takes_adapters:
            return adapter_weights(self._policy)
        if self.config.sampler == "local":
            own = self._copy is not None or isinstance(sampler, AbsentSampler)
            return module_weights(self._policy) if own else None
        return policy_weights(self._policy)

    def environment_states(self) -> dict[str, list[object]]:
        """What environments keep between episodes, by name (``state_dict``); nothing while none is open.

        An environment that cannot say it is left out, with a warning: a failure of its costs no checkpoint.
        """
        if self._open is None:
            return {}
        runner, found = self._open.runner, {}
        for name, pool in runner.pools.items():
            if not pool.spec.has_state:
                continue
            try:
                found[name] = runner.loop.run(pool.states())
            except EnvironmentFailure as failure:
                logger.warning(
                    "the checkpoint is saved without the state of %s, so a resumed run begins it anew: %s",
                    name,
                    failure,
                )
        return {name: states for name, states in found.items() if states}

    def restore_environments(self, states: Mapping[str, Sequence[object]]) -> None:
        """Give environments back what a checkpoint kept of them, before their next reset."""
        if self._open is not None:
            for name, pool in self._open.runner.pools.items():
                self._open.runner.loop.run(pool.restore(states.get(name, ())))

    @property
    def exact_logprobs(self) -> bool:
        """Whether the log-probs that come with samples are those that training computes; True while none sample."""
        return self._open is None or self._open.sampler.exact_logprobs

    @property
    def sampler(self) -> Sampler:
        if self._open is None:
            raise AssertionError("the rollouts are not open")
        return self._open.sampler

    def close(self) -> None:
        """Close the sampler and every instance exactly once. Safe to call twice."""
        with self._life:
            opened, self._open = self._open, None
            try:
                if opened is not None:
                    opened.runner.close()
            finally:
                if opened is not None:
                    opened.sampler.close()
                if self._policy is None or not is_cut(dict(self._policy.base.named_parameters())):
                    self._copy = None  # of cut weights none could be made again
                self._close_unused()
                self._tell()
