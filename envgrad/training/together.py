"""Training on several processes, as a trainer sees it: who takes part, what cannot act there, and how a run ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType

from envgrad.config import RolloutConfig
from envgrad.distributed.absent import AbsentSampler
from envgrad.distributed.gathering import gather_lists
from envgrad.distributed.ranks import Ranks, ranks_of
from envgrad.distributed.waves import SAVING, SharedWaves
from envgrad.errors import (
    ConfigurationError,
    EpisodeLogError,
    NonFiniteError,
    RankStopped,
    SamplerDied,
    StoppedTogether,
    TooManyFailures,
)
from envgrad.sampling.sampler import Sampler
from envgrad.sampling.vllm import VLLMSampler
from envgrad.training.led import LedRounds
from envgrad.training.rounds import RoundPlan, RoundSource
from envgrad.training.signals import Terminated

if TYPE_CHECKING:
    from envgrad.training.trainer import RolloutTrainer

ENDINGS = (
    TooManyFailures, SamplerDied, NonFiniteError, EpisodeLogError, KeyboardInterrupt, Terminated, RankStopped,
    StoppedTogether,
)  # fmt: skip
"""what ends a run with a checkpoint"""


def join_ranks(config: RolloutConfig) -> Ranks:
    """The processes of this run."""
    return ranks_of(config.world_size, float(config.ddp_timeout))


def one_plays(config: RolloutConfig) -> bool:
    """Whether the first process plays for all: vLLM servers take weights from one, and beside training there is one
    producer."""
    return config.world_size > 1 and (config.sampler == "vllm" or config.staleness > 0)


def led(trainer: RolloutTrainer, plan: RoundPlan, make: Callable[[], RoundSource]) -> RoundSource:
    """The source of rounds that ``make`` makes; where it is one process's, as all processes see it."""
    config, ranks, signals = trainer.user_args, trainer.ranks, trainer.signals
    if ranks.size == 1 or not config.staleness:
        return make()
    return LedRounds(ranks, plan, None if ranks.rank else make(), lambda: signals.arrived)


def with_absent(trainer: RolloutTrainer, make: Callable[[], Sampler]) -> Sampler:
    """The sampler that ``make`` makes; where one process plays for all, what stands for it on the others."""
    ranks = trainer.ranks
    if not one_plays(trainer.user_args):
        return make()
    if not ranks.rank:
        sampler = make()
        adapters = isinstance(sampler, VLLMSampler) and sampler.takes_adapters
        gather_lists(ranks, {"exact": [sampler.exact_logprobs], "adapters": [adapters]})
        return sampler
    facts = gather_lists(ranks, {})
    return AbsentSampler(exact_logprobs=facts["exact"][0], takes_adapters=facts["adapters"][0])


def shared_waves(trainer: RolloutTrainer, config: RolloutConfig) -> SharedWaves | None:
    """Who plays which group, where there are several processes."""
    if trainer.ranks.size == 1:
        return None
    signals = trainer.signals
    return SharedWaves(
        ranks=trainer.ranks,
        static=config.deterministic,
        leads=one_plays(config),
        arrived=lambda: signals.arrived,
    )


def check_engine(trainer: RolloutTrainer) -> None:
    """
    Raises:
        ConfigurationError: accelerate was told to cut the model in a way that is not supported here.
    """
    accelerator = trainer.accelerator
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        size = getattr(parallelism, name, 1) or 1
        if size > 1:
            raise ConfigurationError(
                f"parallelism_config has {name}={size}: processes share a step's rows here, never a row or a layer; "
                "use data parallelism alone (DDP, FSDP2, ZeRO)"
            )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigurationError("fsdp_version 1: its weights cannot be gathered one by one; set fsdp_version: 2")
    config = trainer.user_args
    if cuts_weights(trainer) and config.staleness and not config.inflight_weight_updates:
        raise ConfigurationError(
            "inflight_weight_updates=False cannot act on cut weights (FSDP, ZeRO-3) in an asynchronous run of several "
            "processes: an error while episodes end would leave the others in a gather; set it to True"
        )
    if cuts_weights(trainer) and trainer.algorithm.teacher is not None:
        raise ConfigurationError(
            f"{type(trainer.algorithm).__name__} has a teacher, whose forwards are not as many on every process: it "
            "cannot be trained with cut weights (FSDP, ZeRO-3); use DDP or ZeRO-2"
        )


def cuts_weights(trainer: RolloutTrainer) -> bool:
    """Whether no process has the model's weights whole: FSDP, ZeRO-3."""
    accelerator = trainer.accelerator
    if accelerator.distributed_type == DistributedType.FSDP:
        return True
    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    return plugin is not None and plugin.zero_stage == 3


def agreed_epoch(trainer: RolloutTrainer, epoch: float) -> float:
    """The first process's, where it plays for all: it alone knows what has been drawn."""
    if not one_plays(trainer.user_args):
        return epoch
    return float(gather_lists(trainer.ranks, {"epoch": [epoch]})["epoch"][0])


def all_know(trainer: RolloutTrainer, error: BaseException) -> bool:
    """Whether every process ends at the same place, by ``error`` or by word of it: then all can save."""
    if trainer.ranks.size == 1 or isinstance(error, (TooManyFailures, RankStopped, StoppedTogether)):
        return True
    if isinstance(error, (KeyboardInterrupt, Terminated)):
        return trainer.signals.told is not None
    if isinstance(error, NonFiniteError) and trainer.guard.agreed:
        return True
    waves, rounds = trainer.rollouts.waves, None if trainer._stream is None else trainer._stream.rounds
    if isinstance(rounds, LedRounds) and rounds.failed:
        return isinstance(error, SAVING)
    return isinstance(error, (NonFiniteError, SamplerDied)) and waves is not None and waves.failed
