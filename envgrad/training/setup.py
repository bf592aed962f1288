"""What a trainer settles before its first step: how rows are packed, and the arguments that the loop sees."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import SchedulerType

from envgrad.algorithms.base import Algorithm
from envgrad.attention import use_envgrad_attention
from envgrad.config import RolloutConfig
from envgrad.config.reporting import best_metric_name
from envgrad.environments.spec import EnvironmentSpec
from envgrad.errors import ConfigurationError
from envgrad.flex_rows import flex_fault
from envgrad.logprobs import PolicyForward, check_packed_forward
from envgrad.packing import PackMode
from envgrad.rollout.runner import DynamicSampling
from envgrad.sampling.limits import text_config
from envgrad.training.best import chooses_best
from envgrad.training.clock import planned_steps
from envgrad.training.producer import BufferedRounds
from envgrad.training.rounds import InlineRounds, RoundPlan, RoundSource, teaches

logger = logging.getLogger(__name__)


def pack_mode_of(model: PreTrainedModel) -> PackMode:
    """Shared prompts where the model's packed forward equals its plain one; else one plain row per forward."""
    fault = check_packed_forward(model)
    if fault is None:
        use_envgrad_attention(model)
        return "shared"
    logger.warning("rows are trained one per forward, which is slow: %s", fault)
    return "single"


def check_attention(config: RolloutConfig, mode: PackMode) -> None:
    wanted = (config.mapping("model_init_kwargs") or {}).get("attn_implementation")
    if wanted is not None and mode == "shared":
        raise ConfigurationError(
            f"model_init_kwargs has attn_implementation={wanted!r}, which cannot act: packed rows and kept keys and "
            "values need envgrad's own attention; remove it"
        )


def choose_packed_attention(config: RolloutConfig, mode: PackMode, forward: PolicyForward) -> None:
    """How packed rows attend in ``forward``, and in the copies that references and teachers are.

    Raises:
        ConfigurationError: FlexAttention was asked for and cannot act.
    """
    forward.packed_attention = "auto"  # a model may have been in another trainer
    if config.packed_attention != "flex":
        return
    fix = "leave packed_attention at 'auto'"
    if mode == "single":
        raise ConfigurationError(
            f"packed_attention='flex' cannot act: rows of a {type(forward.model).__name__} are not packed, they are "
            f"trained one per forward; {fix}"
        )
    if _attention_dropout(forward.model):
        raise ConfigurationError(
            f"packed_attention='flex' cannot act with dropout in attention; set disable_dropout=True, or {fix}"
        )
    half = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None
    fault = flex_fault(*_heads(forward.model), device=config.device, dtype=half or forward.model.dtype)
    if fault is not None:
        raise ConfigurationError(f"packed_attention='flex' cannot act: {fault}; {fix}")
    forward.packed_attention = "flex"


def _attention_dropout(model: nn.Module) -> bool:
    rates = {
        f"{name}.{key}".removesuffix(".p"): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, float)
    }
    names = {name.rpartition(".")[2] for name, value in rates.items() if value > 0}
    return any("att" in name and "drop" in name for name in names)


def _heads(model: PreTrainedModel) -> tuple[int, int, int]:
    """Heads of queries, of keys and values, and their width."""
    config = text_config(model)
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, int(getattr(config, "num_key_value_heads", None) or heads), int(width)


def loop_args(config: RolloutConfig, epoch_length: int | None) -> RolloutConfig:
    """The arguments as ``Trainer``'s loop must see them: one item a step, no data to skip, NaN shown."""
    args = copy.copy(config)
    args.gradient_accumulation_steps = 1
    args.max_steps = planned_steps(config, epoch_length)
    args.ignore_data_skip = True
    args.logging_nan_inf_filter = False
    on_plateau = config.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    if chooses_best(config) and config.metric_for_best_model in (None, "loss"):
        args.metric_for_best_model, args.greater_is_better = "eval_reward", True
    elif config.metric_for_best_model is not None:  # transformers looks for eval_reward, not for eval/reward
        args.metric_for_best_model = best_metric_name(config.metric_for_best_model)
    if on_plateau:
        mode = {"mode": "max" if args.greater_is_better else "min"}
        args.lr_scheduler_kwargs = mode | dict(config.lr_scheduler_kwargs or {})
    return args


def warn_of_chance(specs: Mapping[str, EnvironmentSpec], algorithm: Algorithm) -> None:
    """Say so where siblings are compared that do not share a task, by the word of their environment.

    Siblings that are forked or copied do share one.
    """
    by_chance = [
        name
        for name, spec in specs.items()
        if spec.determinism == "none" and (spec.uses_task_identity or (spec.has_close and not spec.has_fork))
    ]
    if by_chance and algorithm.compares_siblings:
        logger.warning(
            "%s: determinism is 'none', so siblings of a group may get different tasks, and an advantage is partly "
            "luck of the draw. baseline='batch' (GRPO, RLOO) compares with all episodes instead.",
            ", ".join(by_chance),
        )


def dynamic_sampling(config: RolloutConfig, algorithm: Algorithm) -> DynamicSampling | None:
    """Which groups are replaced, and how often; None: none."""
    rounds = config.dynamic_rounds()
    return None if rounds is None else DynamicSampling(teaches=teaches(algorithm), max_rounds=rounds)


def round_source(config: RolloutConfig, plan: RoundPlan, rounds_left: Callable[[], int]) -> RoundSource:
    """Rounds played while the trainer waits, or, where samples may be older than the weights, beside the training."""
    if not config.staleness:
        return InlineRounds(plan)
    return BufferedRounds(
        plan, max_staleness=config.staleness, inflight=config.inflight_weight_updates, rounds_left=rounds_left
    )


@contextmanager
def shared_threads(config: RolloutConfig) -> Iterator[None]:
    """Half of torch's threads for training and half for the sampler, where both compute in this process at once."""
    before = torch.get_num_threads()
    share = config.staleness > 0 and config.sampler == "local" and config.device.type == "cpu" and before > 1
    if share:
        torch.set_num_threads(before // 2)
    try:
        yield
    finally:
        if share:
            torch.set_num_threads(before)
