"""``RolloutTrainer``: ``transformers.Trainer`` whose dataloader is the step stream.

::

    StepStream --StepItem--> training_step: forward_backward per micro-batch --> optimizer and scheduler step (Trainer)
         ^                                                                             |
         `--------------------------- publish(weights of now) <------------------------'

Callbacks, schedulers, logging, checkpoints and the Hub work as everywhere. What differs: one item is one whole
optimizer step, so the loop's own gradient accumulation is 1; an epoch of the loop is the whole run, and ``state.epoch``
is set by a callback of ours; ``evaluate`` plays episodes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, set_seed
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType, TrainOutput

from envgrad.algorithms.base import Algorithm
from envgrad.attention import use_envgrad_attention
from envgrad.config import RolloutConfig, round_size
from envgrad.errors import ConfigurationError, TooManyFailures
from envgrad.logprobs import check_packed_forward, install_policy_forward, policy_logprobs
from envgrad.losses import LossInputs, LossOutputs, Metric, merge_metrics
from envgrad.packing import MicroBatch, PackMode
from envgrad.rollout.runner import Round
from envgrad.training.checkpoint import AtomicCheckpoints, load_pending, load_progress
from envgrad.training.clock import ClockCallback, planned_groups, planned_steps
from envgrad.training.episode_log import EpisodeLog
from envgrad.training.metrics import MetricAverages, round_metrics
from envgrad.training.model import Reference, has_dropout, is_half_precision, load_policy
from envgrad.training.prepare import Preparation
from envgrad.training.rollouts import EnvironmentFactory, Rollouts
from envgrad.training.stream import StepItem, StepStream

logger = logging.getLogger(__name__)


class RolloutTrainer(AtomicCheckpoints, Trainer):
    """Trains a policy on what its environments play. Use ``GRPOTrainer`` and its kin, or pass an ``algorithm``.

    Args:
        model: A name, a path (a folder or a ``.gguf`` file), ``"starter"``, or a loaded causal language model.
        args: The configuration.
        algorithm: Credit and loss.
        environment_factory: A zero-argument callable that makes an environment, or ``{name: callable}`` for a mixture.
        processing_class: The tokenizer; loaded from the model's place if None.
        callbacks: ``transformers.TrainerCallback``s, added to the usual ones.
        optimizers: ``(optimizer, scheduler)`` instead of those that ``args`` describes.
        peft_config: Puts adapters on the model; only they are trained.

    Raises:
        ConfigurationError: anything that cannot work, before the first episode.
    """

    args: RolloutConfig
    control: TrainerControl

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: RolloutConfig,
        algorithm: Algorithm,
        *,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        peft_config: Any = None,
    ) -> None:
        if args.world_size > 1:
            raise ConfigurationError(f"{args.world_size} processes were started; this version trains in one process")
        set_seed(args.seed)  # before the model: adapters are initialised at random
        policy = load_policy(model, processing_class, args, peft_config)
        self.algorithm = algorithm
        self.user_args = args
        self.rollouts = Rollouts(policy, args, environment_factory)
        with contextlib.ExitStack() as undo:
            undo.callback(self.rollouts.close)
            self._tasks = self.rollouts.train_tasks()
            self._beginning = self._tasks.state_dict()
            install_policy_forward(policy.base)
            self._pack_mode = _pack_mode(policy.base)
            _check_attention(args, self._pack_mode)
            use_cache = policy.base.config.use_cache
            super().__init__(
                model=policy.model,
                args=_loop_args(args, self._tasks.epoch_length),
                processing_class=policy.tokenizer,
                callbacks=list(callbacks),
                optimizers=optimizers,
            )
            inexact = self.args.bf16 or self.args.fp16 or is_half_precision(policy.model)
            needs_reference = algorithm.needs_reference or algorithm.credit_reads_reference
            self.preparation = Preparation(
                trainer=self,
                # Behind Trainer, which puts the model on its device.
                reference=Reference(policy.model) if needs_reference else None,
                recompute_old=has_dropout(policy.model) or inexact,
            )
            policy.base.config.use_cache = use_cache  # Trainer sets it for its own forwards; a saved model wants it on
            undo.pop_all()
        self._averages = MetricAverages()
        self._stream: StepStream | None = None
        self.episode_log = EpisodeLog(Path(args.output_dir) / "episodes") if args.log_episodes else None
        self.last_round: Round | None = None
        self.callback_handler.callbacks.insert(0, ClockCallback(self._tasks))

    # -- the loop, as transformers.Trainer calls it

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """``Trainer.train``; environments and sampler are closed on every way out.

        Raises:
            TooManyFailures: too many groups in a row were dropped; a checkpoint is saved first, unless
                ``save_strategy="no"`` or no step was made.
        """
        with self.rollouts.open():
            try:
                return super().train(*args, **kwargs)
            except TooManyFailures:
                if self.state.global_step and self.args.save_strategy != SaveStrategy.NO:
                    self._save_checkpoint(self.model, trial=None)
                raise

    def get_train_dataloader(self) -> StepStream:
        """The step stream, at the position of the checkpoint that is being resumed, or at the beginning."""
        config = self.user_args
        with self.rollouts.open() as runner:
            self._stream = StepStream(
                tasks=self._tasks,
                runner=runner,
                policy=self.rollouts.group_policy(config.num_generations),
                algorithm=self.algorithm,
                episodes_per_round=round_size(config),
                episodes_per_step=config.episodes_per_step,
                num_iterations=config.num_iterations,
                max_tokens=config.max_tokens_per_microbatch,
                pack_mode=self._pack_mode,
                prepare=self.preparation,
                group_limit=planned_groups(config, self._tasks.epoch_length),
                publish=lambda: self.rollouts.publish(self.state.global_step),
            )
        return self._stream

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, int, int, int, int, int, int]:
        """One epoch of the loop is the whole run: ``max_steps`` items."""
        steps, episodes = args.max_steps, self.user_args.episodes_per_step
        return 1, steps, steps * episodes, steps * episodes, episodes, steps, steps

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[StepItem], None]:
        item = next(epoch_iterator, None)
        return ([] if item is None else [item]), None

    def training_step(self, model: nn.Module, inputs: StepItem, num_items_in_batch: object = None) -> Tensor:
        """Forward and backward of one optimizer step's micro-batches; its metrics are recorded."""
        began = time.perf_counter()
        if inputs.played is not None:
            self._record_round(inputs.played)
        model.train()
        # With nothing to learn from there is no backward: weights and optimizer state stay; the step counts.
        loss = torch.zeros((), device=self.args.device)
        parts: list[Mapping[str, Metric]] = []
        last = len(inputs.batch) - 1
        for index, packed in enumerate(inputs.batch.micro_batches):
            self.accelerator.gradient_state._set_sync_gradients(index == last)
            outputs = self._forward_loss(model, packed.to(self.args.device))
            self.accelerator.backward(outputs.loss)
            loss += outputs.loss.detach()
            parts.append(outputs.metrics)
        self._averages.add(
            merge_metrics(parts)
            | {f"time/{name}": seconds for name, seconds in inputs.seconds.items()}
            | {
                "time/train": time.perf_counter() - began,
                "tokens/trained": float(inputs.batch.num_tokens),
                "tokens/forwarded": float(inputs.batch.num_forwarded_tokens),
            }
        )
        return loss

    def _forward_loss(self, model: nn.Module, packed: MicroBatch) -> LossOutputs:
        """One micro-batch's share of the loss."""
        temperature = self.user_args.temperature
        with self.compute_loss_context_manager():
            outputs = policy_logprobs(model, packed, temperature=temperature, entropy=self.algorithm.entropy)
            return self.algorithm.loss(LossInputs.of(packed, outputs))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Not used here.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("compute_loss is not part of policy-gradient training: give an `algorithm` instead")

    # -- metrics

    def _record_round(self, played: Round) -> None:
        self.last_round = played
        self._averages.add(round_metrics(played))
        if self.episode_log is not None:
            self.episode_log.write(played, step=self.state.global_step)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """``Trainer.log`` with the averages of what was recorded since the last one."""
        if "loss" in logs or "train_runtime" in logs:
            logs = logs | self._averages.take()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: StepItem) -> int:
        """Six per parameter and forwarded token (forward and backward); attention is left out."""
        parameters = self.rollouts.policy.base.num_parameters(exclude_embeddings=True)
        return 6 * inputs.batch.num_forwarded_tokens * int(parameters)

    # -- evaluation and checkpoints

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Play ``eval_tasks`` tasks of ``split="eval"``, the same ones every time; log ``<prefix>_reward`` and others.

        Raises:
            ConfigurationError: ``eval_dataset`` is given: the environment owns the evaluation tasks.
        """
        if eval_dataset is not None:
            raise ConfigurationError(
                "evaluate() draws its tasks from the environment's split='eval'; drop eval_dataset"
            )
        played = self.play_eval()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in round_metrics(played).items()}
        metrics[f"{metric_key_prefix}_time/rollout"] = played.seconds
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def play_eval(self) -> Round:
        """The episodes that ``evaluate`` scores."""
        config = self.user_args
        with self.rollouts.open() as runner:
            self.rollouts.publish(self.state.global_step)
            policy = self.rollouts.group_policy(config.num_generations_eval or 1)
            played = runner.play(self.rollouts.eval_tasks(), config.eval_tasks, policy)
        if self.episode_log is not None:
            self.episode_log.write(played, step=self.state.global_step)
        return played

    def _validate_args(self) -> None:
        """Evaluation needs no dataset here."""
        strategy, self.args.eval_strategy = self.args.eval_strategy, IntervalStrategy.NO
        super()._validate_args()
        self.args.eval_strategy = strategy

    def progress_state(self) -> dict[str, Any]:
        """The task stream's position, for a checkpoint."""
        return {"tasks": self._tasks.state_dict()}

    def pending_steps(self) -> list[StepItem]:
        """What is left of the round in hand, without its episodes, which are in the log."""
        return [] if self._stream is None else [item.without_episodes() for item in self._stream.pending]

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Put the tasks where the checkpoint left them, or at the beginning, before the first of them is drawn."""
        checkpoint = kwargs.get("resume_from_checkpoint", args[2] if len(args) > 2 else None)
        self._tasks.load_state_dict(self._beginning if checkpoint is None else load_progress(checkpoint)["tasks"])
        if checkpoint is not None and self._stream is not None:
            self._stream.pending.extend(load_pending(checkpoint))
        epochs, steps = super()._init_training_state(max_steps, *args, **kwargs)
        return epochs, steps

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saved arguments show what the user asked for, not the loop's own accumulation of 1."""
        loop_args, self.args = self.args, self.user_args
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = loop_args

    def close(self) -> None:
        """Close what construction opened. ``train`` and ``evaluate`` close what they open by themselves."""
        self.rollouts.close()


def _pack_mode(model: PreTrainedModel) -> PackMode:
    """Shared prompts where the model's packed forward equals its plain one; else one plain row per forward."""
    fault = check_packed_forward(model)
    if fault is None:
        use_envgrad_attention(model)
        return "shared"
    logger.warning("rows are trained one per forward, which is slow: %s", fault)
    return "single"


def _check_attention(config: RolloutConfig, mode: PackMode) -> None:
    wanted = (config.mapping("model_init_kwargs") or {}).get("attn_implementation")
    if wanted is not None and mode == "shared":
        raise ConfigurationError(
            f"model_init_kwargs has attn_implementation={wanted!r}, which cannot act: packed rows and kept keys and "
            "values need envgrad's own attention; remove it"
        )


def _loop_args(config: RolloutConfig, epoch_length: int | None) -> RolloutConfig:
    """The arguments as ``Trainer``'s loop must see them: one item a step, no data to skip, NaN shown."""
    args = copy.copy(config)
    args.gradient_accumulation_steps = 1
    args.max_steps = planned_steps(config, epoch_length)
    args.ignore_data_skip = True
    args.logging_nan_inf_filter = False
    on_plateau = config.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    has_best = config.load_best_model_at_end or config.save_strategy == SaveStrategy.BEST or on_plateau
    if has_best and config.metric_for_best_model in (None, "loss"):
        args.metric_for_best_model, args.greater_is_better = "eval_reward", True
    if on_plateau:
        mode = {"mode": "max" if args.greater_is_better else "min"}
        args.lr_scheduler_kwargs = mode | dict(config.lr_scheduler_kwargs or {})
    return args
