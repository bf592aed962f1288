"""What a trainer settles before its first step: how rows are packed, and the arguments that the loop sees."""

from __future__ import annotations

import copy
import logging

from transformers import PreTrainedModel
from transformers.trainer_utils import SaveStrategy, SchedulerType

from envgrad.attention import use_envgrad_attention
from envgrad.config import RolloutConfig
from envgrad.errors import ConfigurationError
from envgrad.logprobs import check_packed_forward
from envgrad.packing import PackMode
from envgrad.training.clock import planned_steps

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


def loop_args(config: RolloutConfig, epoch_length: int | None) -> RolloutConfig:
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
