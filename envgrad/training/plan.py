"""What is played, found out at construction: environments, tasks, reward sources, the renderer, sizes of groups."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from envgrad.chat.base import Renderer
from envgrad.chat.renderer import ChatRenderer
from envgrad.config import RolloutConfig, round_size
from envgrad.config.mixture import check_environment_names, environment_options
from envgrad.environments.adapters.other_python import OtherPython
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import IDENTITY_NAMES, EnvironmentSpec, inspect_environment
from envgrad.environments.dataset_tasks import Dataset, MapDataset
from envgrad.environments.executors import ElsewhereFactory, factory_elsewhere
from envgrad.environments.pool import InstancePool
from envgrad.environments.stateless import stateless_spec
from envgrad.environments.tasks import CurriculumOptions, TaskStream, build_task_stream
from envgrad.environments.tools import build_tools
from envgrad.errors import ConfigurationError, EnvironmentContractError
from envgrad.rewards.functions import RewardFunction
from envgrad.rewards.unused import UnusedWeights
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.scoring import RewardSource, RewardWeights
from envgrad.training.inputs import EnvironmentFactory, UserInputs, columns_of
from envgrad.training.model import Policy

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer

LEAST_CONCURRENCY = 64
"""episodes in flight where the user sets no bound: a small training batch must not make evaluation crawl"""

KILL_SECONDS = 1.0
"""what ending an instance's process may take beyond its ``close_timeout``"""

METRIC_NAMES = ("turns", "unscored")
"""``episodes/<name>`` is a metric of these already"""


def _close_probes(
    probes: dict[str, object],
    specs: Mapping[str, EnvironmentSpec],
    close_timeout: float,
    processes: Sequence[ElsewhereFactory],
) -> None:
    """Close probe instances that no pool took over, and end what holds instances. Safe to call twice."""
    try:
        while probes:
            name, probe = probes.popitem()
            InstancePool(specs[name], probe, limit=1, workers=WorkerPool(1), close_timeout=close_timeout).close_now()
    finally:
        for factory in processes:
            factory.close()


class RolloutPlan:
    """Inspects what was given.

    Raises:
        ConfigurationError: an environment that breaks the contract, a dataset that does not fit, a reward source that
            cannot score, a template that cannot be used.
        KeyError: a dataset without ``prompt``, and no environment.
    """

    def __init__(
        self, policy: Policy | None, config: RolloutConfig, inputs: UserInputs, trainer: RolloutTrainer | None = None
    ) -> None:
        self._policy = policy
        self.config = config
        self.inputs = inputs
        self.specs: dict[str, EnvironmentSpec] = {}
        self._trainer = trainer
        self._probes: dict[str, object] = {}
        self._processes: list[ElsewhereFactory] = []
        self.close_timeout = config.close_timeout + (KILL_SECONDS if config.environment_executor != "thread" else 0.0)
        """seconds that a pool waits for a ``close()``: one in another process is ended there before"""
        self._finalizer = weakref.finalize(
            self, _close_probes, self._probes, self.specs, self.close_timeout, self._processes
        )
        self._routed = isinstance(inputs.environment_factory, Mapping)
        if inputs.rollout_func is not None and config.deterministic:
            raise ConfigurationError("deterministic=True cannot be promised for a rollout_func; turn it off")
        with contextlib.ExitStack() as undo:
            undo.callback(self._finalizer)
            self._inspect()
            check_environment_names(config, self.specs, named=self._routed)
            self._check_agents()
            self.options = environment_options(config)
            self.reward_sources, self.reward_weights = self._reward_sources()
            self.unused_weights = UnusedWeights(self.reward_weights.by_name, self.specs)
            self.train_tasks()
            self._check_eval()
            self.renderer = self._make_renderer()
            undo.pop_all()

    @property
    def stateless(self) -> bool:
        """Whether there is no environment: a dataset's prompts, and reward functions."""
        return self.inputs.environment_factory is None

    def _inspect(self) -> None:
        for most in self._most_sessions():
            siblings = max(self.config.num_generations, self.config.num_generations_eval or 1)
            if most < siblings:
                raise ConfigurationError(
                    f"max_sessions={most} must be at least num_generations={siblings}: the siblings of a group are "
                    "played at once, each in a session"
                )
        shared = build_tools(self.inputs.tools or ())
        columns = self.inputs.columns()
        for name, factory in self.factories().items():
            if name in METRIC_NAMES:
                raise ConfigurationError(
                    f"an environment cannot be called {name!r}: metrics of that name exist; name it otherwise"
                )
            factory = self._in_process(name, factory)
            spec, probe = inspect_environment(name, factory, columns=columns, routed=self._routed)
            self._probes[name] = probe
            self.specs[name] = spec
            self.specs[name] = spec.with_tools(shared)
            if not spec.may_reward and not self.inputs.reward_funcs:
                raise EnvironmentContractError(
                    f"{name} has no reward source: define get_reward(self) -> float, pay from step or tools, or pass "
                    "reward_funcs="
                )
        if self.stateless and self.config.environment_executor != "thread":
            raise ConfigurationError(
                f"environment_executor={self.config.environment_executor!r} cannot act: there is no environment; give "
                "environment_factory=, or drop it"
            )
        if self.stateless:
            self.specs[""] = stateless_spec().with_tools(shared)

    def _in_process(self, name: str, factory: EnvironmentFactory) -> EnvironmentFactory:
        """``factory``, or one whose instances live in processes of their own, if the run asks for that."""
        executor = self.config.environment_executor
        if executor == "thread":
            return factory
        if isinstance(factory, OtherPython):
            if executor == "ray":
                raise ConfigurationError(
                    f"environment_executor='ray' cannot act on {name}: OtherPython starts processes on this machine; "
                    "use 'thread', or install the environment's packages on the cluster"
                )
            return factory  # that has processes already
        made = factory_elsewhere(
            executor,
            factory,
            name,
            close_seconds=self.config.close_timeout,
            ray=self.config.ray_options(self._concurrency()),
        )
        self._processes.append(made)
        return made

    def _close_unused(self) -> None:
        """Close instances that no pool took over, and end the processes that hold instances. Safe to call twice."""
        _close_probes(self._probes, self.specs, self.close_timeout, self._processes)

    def _check_agents(self) -> None:
        """Agents that own their loop ask whenever they like, over a socket."""
        agents = [name for name, spec in self.specs.items() if spec.runs_agent]
        if not agents:
            return
        from envgrad.agents.server import check_installed

        check_installed()
        if self.config.deterministic:
            raise ConfigurationError(
                f"deterministic=True cannot be promised for {agents[0]}: its run_agent asks when it likes; turn it off"
            )

    def factories(self) -> dict[str, EnvironmentFactory]:
        """What makes the environments, by name."""
        given = self.inputs.environment_factory
        if given is None:
            return {}
        if isinstance(given, Mapping):
            return dict(given)
        name = getattr(given, "__name__", type(given).__name__)
        return {name if name.isidentifier() else "environment": given}

    def _reward_sources(self) -> tuple[tuple[RewardSource, ...], RewardWeights]:
        trainer = self._trainer
        if self.inputs.reward_funcs is None and self.config.reward_weights is None:
            return (), RewardWeights()
        from envgrad.rewards.build import build_reward_sources
        from envgrad.rewards.models import RewardModelOptions

        has_tools = any(spec.tools or spec.dynamic_tools for spec in self.specs.values())
        return build_reward_sources(
            self.inputs.reward_funcs,
            reward_processing_classes=self.inputs.reward_processing_classes,
            reward_weights=self._weights(),
            trainer_state=lambda: None if trainer is None else trainer.state,
            columns=None if self.inputs.rollout_func is not None else self.inputs.columns(),
            environment_names=[name for name in self.specs if name],
            has_tools=has_tools,
            model_options=RewardModelOptions(
                trust_remote_code=self.config.trust_remote_code,
                chat_template_kwargs=self.config.mapping("chat_template_kwargs") or {},
                device=self.config.device,
                has_tools=has_tools,
            ),
        )

    def _weights(self) -> Sequence[float] | Mapping[str, float] | None:
        weights = self.config.reward_weights
        if isinstance(weights, str):
            raise AssertionError("reward_weights are read on construction")
        return weights

    def _asks_feedback(self) -> bool:
        """Whether the trainer's algorithm reads what environments say of finished episodes."""
        plan = None if self._trainer is None else self._trainer.algorithm.teacher
        return plan is not None and plan.reprompting.include_environment_feedback

    def _check_eval(self) -> None:
        """Evaluation that was asked for must have tasks, with what reward functions read."""
        for _ in self.eval_streams():
            pass
        self._check_eval_columns()
        if (
            self.config.eval_strategy != "no"
            and self.inputs.eval_dataset is None
            and self.inputs.train_dataset is not None
        ):
            fed = [
                name
                for name, spec in self.specs.items()
                if spec.stateless or spec.reset_required - IDENTITY_NAMES - {"split"}
            ]
            if fed:
                raise ConfigurationError(
                    f"eval_strategy={str(self.config.eval_strategy.value)!r} needs eval_dataset=: rows feed "
                    f"{fed[0] or 'the episodes'}, so evaluation needs rows too"
                )

    def _check_eval_columns(self) -> None:
        if self.inputs.rollout_func is not None:
            return  # it adds columns of its own
        columns = {name: columns_of(dataset) for name, dataset in self.inputs.datasets() if name != "train_dataset"}
        if not columns and self.config.eval_strategy != "no" and not self.stateless:
            columns = {f"split='eval' of {', '.join(self.specs)} (no eval_dataset)": frozenset()}
        for source in self.reward_sources:
            for name, known in columns.items():
                if isinstance(source, RewardFunction) and known is not None:
                    source.check_dataset(known, name)

    @property
    def has_policy(self) -> bool:
        """Whether a model of ours is sampled."""
        return self._policy is not None

    @property
    def policy(self) -> Policy:
        """The model that is sampled; only rollouts with a sampler of their own have none."""
        if self._policy is None:
            raise AssertionError("these rollouts have no policy: another sampler answers")
        return self._policy

    def _make_renderer(self) -> Renderer:
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
        shuffle, curriculum = self.config.shuffle_dataset, self.config.curriculum_options()
        return self._stream("train", self.inputs.train_dataset, shuffle=shuffle, curriculum=curriculum)

    def eval_tasks(self) -> TaskStream:
        """The environments' evaluation tasks from their beginning; their ids never meet the training ids."""
        return self._stream("eval", None, shuffle=False)

    def eval_streams(self, dataset: Dataset | Mapping[str, Dataset] | None = None) -> dict[str, tuple[TaskStream, int]]:
        """What an evaluation plays: ``{name: (tasks, how many)}``; the name is empty unless datasets are named.

        ``dataset`` replaces the ``eval_dataset`` given at construction. A dataset is played whole, one without length
        and the environments' own tasks up to ``eval_tasks``.
        """
        chosen = self.inputs.eval_dataset if dataset is None else dataset
        if chosen is None:
            if self.stateless:
                return {}
            return {"": (self.eval_tasks(), self.config.eval_tasks)}
        named = dict(chosen) if isinstance(chosen, Mapping) else {"": chosen}
        return {
            name: (
                self._stream("eval", rows, shuffle=False),
                len(rows) if isinstance(rows, MapDataset) else self.config.eval_tasks,
            )
            for name, rows in named.items()
        }

    def _stream(
        self, split: str, dataset: Dataset | None, *, shuffle: bool, curriculum: CurriculumOptions | None = None
    ) -> TaskStream:
        return build_task_stream(
            {} if self.stateless else self.specs,
            seed=self.config.seed,
            split=split,
            dataset=dataset,
            weights=self.config.mapping("environment_weights"),
            shuffle=shuffle,
            routed=self._routed,
            curriculum=curriculum,
        )

    def train_policy(self) -> GroupPolicy:
        """How training's groups are played; environments may have sizes of their own."""
        policy = self.group_policy(self.config.num_generations)
        sizes = {name: options.num_generations for name, options in self.options.items()}
        sizes = {name: size for name, size in sizes.items() if size != policy.num_generations}
        return replace(policy, sizes=sizes, max_groups=self._max_groups(max([policy.num_generations, *sizes.values()])))

    def group_policy(self, num_generations: int, at_once: int | None = None) -> GroupPolicy:
        """``at_once`` bounds the episodes in flight further."""
        most = self._max_groups(num_generations)
        return GroupPolicy(
            num_generations=num_generations,
            max_groups=most if at_once is None else min(most, max(1, at_once // num_generations)),
            max_episode_retries=self.config.max_episode_retries,
            group_consistency=self.config.group_consistency,
            end_on_nonfinite=self.config.on_nonfinite == "raise",
        )

    def _concurrency(self) -> int:
        rounds = 1 + self.config.staleness
        wanted = self.config.max_concurrent_episodes or max(
            round_size(self.config) * rounds, self.config.per_device_eval_batch_size or 0, LEAST_CONCURRENCY
        )
        return min([wanted, *self._most_sessions()])

    def _most_sessions(self) -> list[int]:
        """Sessions that an environment's server gives at once (``max_sessions`` of its factory): no group must wait for
        those that another one holds."""
        given = [getattr(factory, "max_sessions", None) for factory in self.factories().values()]
        return [most for most in given if isinstance(most, int)]

    def _max_groups(self, num_generations: int) -> int:
        return max(1, self._concurrency() // num_generations)
