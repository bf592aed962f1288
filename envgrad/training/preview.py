"""A run before it starts: the model without its weights, and the first prompt as the model will read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from envgrad.config import RolloutConfig
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.check.stand_in import with_stand_in
from envgrad.environments.contract import inspect_environment
from envgrad.environments.isolation import Isolation
from envgrad.environments.pool import InstancePool
from envgrad.errors import ConfigurationError, first_line
from envgrad.rollout.context import EpisodeContext, EpisodeLimits
from envgrad.rollout.loop import RolloutLoop
from envgrad.rollout.opening import Opening
from envgrad.rollout.starting import Starter
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.training.inputs import UserInputs
from envgrad.training.model import Policy, load_tokenizer, model_source
from envgrad.training.rollouts import Rollouts
from envgrad.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The first task, and how its episode opens."""

    task: Task
    opening: Opening
    text: str
    """the prompt as one text"""
    pieces: tuple[str, ...]
    """the text of each token"""
    in_flight: int
    """episodes that may be played at once"""


def outline_policy(name: str, config: RolloutConfig) -> Policy:
    """The policy with its tokenizer, and without its weights: its tensors are on torch's meta device.

    Raises:
        ConfigurationError: a path or name that cannot be loaded.
    """
    kwargs = config.mapping("model_init_kwargs") or {}
    source = model_source(name, kwargs)
    dtype = kwargs.pop("dtype", torch.float32)
    if isinstance(dtype, str):
        dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"model_init_kwargs: dtype must be a name of torch's, such as bfloat16, got {dtype!r}")
    known = {key: kwargs[key] for key in ("gguf_file", "revision", "subfolder", "cache_dir", "token") if key in kwargs}
    try:
        sizes = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code, **known)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                sizes, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model={source!r} cannot be loaded: {first_line(error)}") from error
    if (Path(source) / "generation_config.json").is_file() or not Path(source).exists():
        model.generation_config = _generation_config(source) or model.generation_config
    return Policy(model=model, tokenizer=load_tokenizer(source, kwargs, config))


def _generation_config(source: str) -> GenerationConfig | None:
    try:
        found: GenerationConfig = GenerationConfig.from_pretrained(source)
    except OSError:  # a model need not have one
        return None
    return found


def preview(policy: Policy, config: RolloutConfig, inputs: UserInputs) -> Preview:
    """Reset one environment to the first task, and render its opening. Nothing is sampled; what was made is closed.

    Raises:
        ConfigurationError: as the trainer's construction.
        EpisodeFailure: ``reset`` failed.
    """
    rollouts = Rollouts(policy, config, inputs)
    try:
        task = rollouts.train_tasks().take(1)[0]
        opening = _open(rollouts, config, task)
        groups = rollouts.train_policy()
        most = (groups.max_groups or 1) * groups.num_generations
    finally:
        rollouts.close()
    ids = list(opening.prompt_ids)
    tokenizer = policy.tokenizer
    return Preview(
        task=task,
        opening=opening,
        text=str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)),
        pieces=tuple(str(tokenizer.decode([one], clean_up_tokenization_spaces=False)) for one in ids),
        in_flight=most,
    )


def _open(rollouts: Rollouts, config: RolloutConfig, task: Task) -> Opening:
    spec = rollouts.specs[task.environment]
    workers, loop = WorkerPool(), RolloutLoop()
    context = EpisodeContext(
        spec=spec,
        renderer=rollouts.renderer,
        sampler=ScriptedSampler([]),
        sampling=SamplingParams(max_tokens=1),
        workers=workers,
        isolation=Isolation(spec.isolation_mode(config.isolate_generators)),
        limits=EpisodeLimits(max_completion_length=1, max_context=1, reset_timeout=config.reset_timeout),
    )
    _, probe = inspect_environment(spec.name, spec.factory)
    pool = InstancePool(spec, probe, limit=2, workers=workers, close_timeout=config.close_timeout)

    async def open_and_end() -> Opening:
        starter = Starter(context, pool, task)
        begin = await starter.fresh()
        await starter.end(begin)
        return begin.opening

    try:
        return loop.run(with_stand_in(open_and_end()))
    finally:
        loop.run(pool.close())
        workers.close()
        loop.close()
