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
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerControl, set_seed
from transformers.trainer_utils import IntervalStrategy, TrainOutput

from envgrad.algorithms.base import Algorithm
from envgrad.config import RolloutConfig, round_size
from envgrad.config.mixture import own_temperatures
from envgrad.distributed.dealing import share_of
from envgrad.distributed.ranks import Leaving
from envgrad.errors import ConfigurationError
from envgrad.logprobs import install_policy_forward
from envgrad.losses import LossOutputs, merge_metrics
from envgrad.packing import TOKENS_ON_CPU
from envgrad.rollout.runner import Round
from envgrad.training.best import BestModelTrainer, check_best_metric
from envgrad.training.clock import ClockCallback, planned_groups
from envgrad.training.completions import completion_log
from envgrad.training.episode_log import round_credit, trainer_log
from envgrad.training.evaluating import EvaluatingTrainer
from envgrad.training.guards import Guard
from envgrad.training.inputs import UserInputs
from envgrad.training.metrics import MetricAverages, round_metrics
from envgrad.training.model import load_policy
from envgrad.training.passes import TrainingThreads
from envgrad.training.phases import phase_report, phase_shares, training_flops
from envgrad.training.prepare import Preparation
from envgrad.training.publishing import PublishingTrainer
from envgrad.training.reference import sync_reference
from envgrad.training.resume import ResumingTrainer
from envgrad.training.rollouts import Rollouts
from envgrad.training.rounds import RoundPlan
from envgrad.training.setup import (
    check_attention,
    choose_packed_attention,
    dynamic_sampling,
    loop_args,
    pack_mode_of,
    round_source,
    shared_threads,
    warn_of_chance,
)
from envgrad.training.step_passes import PassesTrainer
from envgrad.training.stream import StepItem, StepStream
from envgrad.training.teacher import Teacher
from envgrad.training.together import ENDINGS, agreed_epoch, all_know, check_engine, led

logger = logging.getLogger(__name__)


class RolloutTrainer(PassesTrainer, ResumingTrainer, BestModelTrainer, EvaluatingTrainer, PublishingTrainer, Trainer):
    """Trains a policy on what its environments play. Use ``GRPOTrainer`` and its kin, or pass an ``algorithm``.

    Args:
        model: A name, a path (a folder or a ``.gguf`` file), ``"starter"``, or a loaded causal language model.
        args: The configuration.
        algorithm: Credit and loss.
        inputs: Environments, datasets, reward functions, tools.
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
        inputs: UserInputs,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        self.join(args)
        set_seed(args.seed)  # before the model: adapters are initialised at random
        policy = load_policy(model, processing_class, args, peft_config, quantization_config)
        self.algorithm = algorithm
        self.user_args = args
        self._stream: StepStream | None = None
        self._averages = MetricAverages()
        self.rollouts = Rollouts(policy, args, inputs, self)
        with contextlib.ExitStack() as undo:
            undo.callback(self.rollouts.close)
            self._tasks = self.rollouts.train_tasks()
            self.algorithm = algorithm.with_reward_weights(self.rollouts.reward_weights.by_name)
            warn_of_chance(self.rollouts.specs, self.algorithm)
            self._beginning = self.rollout_state()
            forward = install_policy_forward(policy.base)
            self.pack_mode = pack_mode_of(policy.base)
            check_attention(args, self.pack_mode)
            choose_packed_attention(args, self.pack_mode, forward)
            check_best_metric(args, self.rollouts)
            use_cache = policy.base.config.use_cache
            super().__init__(
                model=policy.model,
                args=loop_args(args, self._tasks.epoch_length),
                processing_class=policy.tokenizer,
                callbacks=list(callbacks),
                optimizers=optimizers,
            )
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # copied here, before Trainer would move it
                self._move_model_to_device(policy.model, self.args.device)
            self.preparation = Preparation.of(self, policy.model, inputs)
            self.teacher = self._teacher(policy.model)
            self._sync_reference = sync_reference(args, self.preparation.reference)
            if self._sync_reference is not None:
                self.add_callback(self._sync_reference)
            policy.base.config.use_cache = use_cache  # Trainer sets it for its own forwards; a saved model wants it on
            undo.pop_all()
        self._phases = phase_report(policy.base, self.args, self._averages.add)
        self.add_callback(self._phases)
        check_engine(self)
        self.guard = Guard(self.accelerator, policy.model, args.on_nonfinite, self._averages.add, self.meet)
        self.add_callback(self.guard)
        self.episode_log = trainer_log(self)
        self.completion_log = completion_log(args, self.args.report_to) if not self.ranks.rank else None
        self.last_round: Round | None = None
        self._told_of_nothing = False
        self.callback_handler.callbacks.insert(
            0, ClockCallback(self._tasks, self._unused_tasks, partial(agreed_epoch, self))
        )

    def _teacher(self, policy: nn.Module) -> Teacher | None:
        """What the algorithm distils from; it follows the training as a callback."""
        if self.algorithm.teacher is None:
            return None
        teacher = Teacher(
            self.algorithm.teacher,
            policy,
            renderer=self.rollouts.renderer,
            temperature=self.user_args.temperature,
            autocast=self.accelerator.autocast,
        )
        self.add_callback(teacher)
        return teacher

    # -- the loop, as transformers.Trainer calls it

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """``Trainer.train``; environments and sampler are closed on every way out.

        Raises:
            TooManyFailures: too many groups in a row were dropped.
            SamplerDied: the sampler's process or server is gone.
            NonFiniteError: a number is not finite (``on_nonfinite``).
            EpisodeLogError: the episode log could not be written.
            KeyboardInterrupt, Terminated: SIGINT or SIGTERM came (``training.signals``).

        Before one of these a checkpoint is saved, unless ``save_strategy="no"`` or no step was made. Of several
        processes all save, where the error or signal is known to all of them; ``RankFailed`` is what the others raise
        where it is not.
        """
        with (
            Leaving(self.ranks),
            self.signals,
            self.trackers.open(),
            shared_threads(self.user_args),
            TrainingThreads() as self.threads,
            self.rollouts.open(),
            self.logged_episodes(),
        ):
            try:
                return super().train(*args, **kwargs)
            except ENDINGS as error:
                if all_know(self, error):
                    self.save_on_the_way_out()
                raise
            finally:
                self.signals.hold()
                if self._stream is not None:
                    self._stream.rounds.close()

    def get_train_dataloader(self) -> StepStream:
        """The step stream, at the position of the checkpoint that is being resumed, or at the beginning."""
        config = self.user_args
        with self.rollouts.open() as runner:
            policy = self.rollouts.train_policy()
            plan = RoundPlan(
                tasks=self._tasks,
                runner=runner,
                policy=policy,
                groups=round_size(config) // policy.num_generations,
                publish=self._publish,
                group_limit=planned_groups(config, self._tasks.epoch_length),
                dynamic=dynamic_sampling(config, self.algorithm),
            )
            self._stream = StepStream(
                rounds=led(self, plan, lambda: round_source(config, plan, self._rounds_left)),
                policy=policy,
                algorithm=self.algorithm,
                episodes_per_step=config.episodes_per_step,
                num_iterations=config.num_iterations,
                max_tokens=config.max_tokens_per_microbatch,
                preferred_tokens=TOKENS_ON_CPU if self.args.device.type == "cpu" else None,
                ranks=self.ranks.size,
                pack_mode=self.pack_mode,
                prepare=self.preparation,
                temperatures=own_temperatures(config),
                reprompt=None if self.teacher is None else self.teacher.reprompt,
            )
        return self._stream

    def _publish(self) -> int:
        version: int = self.state.global_step
        self.rollouts.publish(version)
        return version

    def _rounds_left(self) -> int:
        """Rounds that the steps still to be made need."""
        config = self.user_args
        steps = -(-round_size(config) // config.episodes_per_step) * config.num_iterations
        left: int = self.args.max_steps - self.state.global_step
        return -(-left // steps)

    def _unused_tasks(self) -> int:
        return 0 if self._stream is None else self._stream.rounds.unused

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, int, int, int, int, int, int]:
        """One epoch of the loop is the whole run: ``max_steps`` items."""
        steps, episodes = args.max_steps, self.user_args.episodes_per_step
        return 1, steps, steps * episodes, steps * episodes, episodes, steps, steps

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[StepItem], None]:
        self._phases.begin()
        if self._stream is not None:
            self._stream.fill()
        self.signals.hold()  # until the step is made, or given back
        item = next(epoch_iterator, None)
        if item is None:
            self.signals.release()
        return ([] if item is None else [item]), None

    def training_step(self, model: nn.Module, inputs: StepItem, num_items_in_batch: object = None) -> Tensor:
        """Forward and backward of one optimizer step's micro-batches; its metrics are recorded."""
        self._phases.fetched(inputs)
        if inputs.played is not None:
            self._record_round(inputs.played)
            items = [inputs, *(self._stream.pending if self._stream is not None else ())]
            if self.episode_log is not None:
                credit = round_credit(items, recomputed=self.preparation.recomputes)
                self.episode_log.write(inputs.played, step=self.state.global_step, credit=credit)
            self.record_for_logs(inputs.played, items)
        self._phases.recorded()
        model.train()
        # With nothing to learn from there is no backward: weights and optimizer state stay; the step counts.
        loss = torch.zeros((), device=self.args.device)
        parts = self.outputs = []
        own = share_of(inputs.batch, self.ranks.rank, self.ranks.size)
        self.guard.begin()
        for outputs in self._passes(model, inputs, own):
            loss += outputs.loss.detach()
            parts.append(LossOutputs(loss=outputs.loss.detach(), metrics=outputs.metrics))
        made = self.guard.allows(own, self.state.global_step + 1, self.algorithm)
        metrics = merge_metrics(one.metrics for one in parts)
        if self.met is not None:
            loss, metrics = torch.full_like(loss, self.met.loss), dict(self.met.metrics)
        metrics = metrics if made else {}  # of no update there is nothing to tell
        self._phases.trained()
        if not made:
            loss = torch.zeros_like(loss)
        elif parts:
            self.algorithm.after_step(metrics)
        elif self.teacher is None and not self._told_of_nothing:  # a teacher has words of its own
            self._told_of_nothing = True
            logger.warning(
                "step %d teaches nothing, so the weights stay: no sample has an advantage (siblings earned the same), "
                "or all are masked. frac_reward_zero_std shows how often; this is said once",
                self.state.global_step + 1,
            )  # fmt: skip
        self._averages.add(
            metrics
            | inputs.metrics
            | ({} if self.teacher is None else {"tokens/teacher": float(inputs.batch.num_teacher_tokens)})
        )
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Not used here.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("compute_loss is not part of policy-gradient training: give an `algorithm` instead")

    # -- metrics

    def _record_round(self, played: Round) -> None:
        self.last_round = played
        metrics = round_metrics(played)
        self._averages.add(metrics)
        self.state.num_input_tokens_seen += int(metrics["tokens/prompt"] + metrics["tokens/sampled"])
        self.rollouts.unused_weights.observe(played.scored)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """``Trainer.log`` with the averages of what was recorded since the last one."""
        if "loss" in logs or "train_runtime" in logs:
            averages = self._averages.take()
            logs = logs | averages | phase_shares(averages)
            logs |= self.rollouts.tally.metrics() if "train_runtime" in logs else {}
            if "time/step" in averages:  # as trl calls it; tokens are counted from the run's beginning
                logs["step_time"] = averages["time/step"]
                logs["num_tokens"] = float(self.state.num_input_tokens_seen)
        super().log(logs, start_time)
        if self.episode_log is not None:
            numbers = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
            self.episode_log.metrics(self.state.global_step, numbers)
        self.show_for_logs(logs)

    def floating_point_ops(self, inputs: StepItem) -> int:
        """Of a step's forward and backward (``flops``); 0 for a model whose configuration does not tell."""
        if self._phases.cost is None:
            return 0
        return training_flops(inputs, self._phases.cost) // self.ranks.size  # Trainer adds up all processes' part

    # -- evaluation and checkpoints

    def _validate_args(self) -> None:
        """Evaluation needs no dataset here."""
        strategy, self.args.eval_strategy = self.args.eval_strategy, IntervalStrategy.NO
        super()._validate_args()
        self.args.eval_strategy = strategy

    def close(self) -> None:
        """Close what construction opened. ``train`` and ``evaluate`` close what they open by themselves."""
        self.trackers.close()
        self.rollouts.close()
