"""What a model can be asked: the longest row, the vocabulary, and requests that fit them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.requests import StopStrings
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.sampling_ops import check_params


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model inside ``model`` (transformers' configurations are untyped)."""
    config: Any = model.config
    return config.get_text_config()


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many token ids the model knows."""
    return int(text_config(model).vocab_size)


@contextmanager
def serving(model: PreTrainedModel, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Dropout off, no gradients, autocast on if given; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    with ExitStack() as stack:
        stack.callback(_set_training, training, True)
        _set_training(training, False)
        stack.enter_context(torch.no_grad())
        if autocast is not None:
            stack.enter_context(torch.autocast(model.device.type, dtype=autocast))
        yield


def _set_training(modules: list[torch.nn.Module], training: bool) -> None:
    # not module.train(), which would also switch children that were in another mode
    for module in modules:
        module.training = training


def context_of(model: PreTrainedModel, max_context: int | None, max_kv_tokens: int | None = None) -> int:
    """The longest row in tokens: ``max_context``, or what the model and the KV memory allow.

    Raises:
        ConfigurationError: longer than one of them allows.
    """
    model_limit = getattr(text_config(model), "max_position_embeddings", None)
    limit = model_limit if isinstance(model_limit, int) else None
    if max_context is None:
        if limit is None:
            raise ConfigurationError(f"{type(model).__name__} names no max_position_embeddings; give max_context")
        return limit if max_kv_tokens is None else min(limit, max_kv_tokens)
    if max_context < 2 or (limit is not None and max_context > limit):
        raise ConfigurationError(f"max_context must be from 2 to the model's {limit} tokens, got {max_context}")
    if max_kv_tokens is not None and max_kv_tokens < max_context:
        raise ConfigurationError(
            f"max_kv_tokens={max_kv_tokens} cannot hold one row of max_context={max_context}; make it at least that"
        )
    return max_context


def check_request(prompt_ids: Sequence[int], params: SamplingParams, *, max_context: int, vocabulary: int) -> None:
    """Refuse a request that cannot be answered.

    Raises:
        SamplerFailure: the prompt is empty, fills the context, or has ids outside the vocabulary.
        ConfigurationError: a parameter out of range.
    """
    check_params(params)
    if not prompt_ids:
        raise SamplerFailure("the prompt is empty; a prompt has at least one token")
    if len(prompt_ids) >= max_context:
        raise SamplerFailure(
            f"a prompt of {len(prompt_ids)} tokens leaves no room for an answer in a context of {max_context}; "
            "shorten it, or raise max_context"
        )
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocabulary:
        raise SamplerFailure(
            f"the prompt has token id {low if low < 0 else high}, the model's ids are 0 to {vocabulary - 1}; "
            "is the tokenizer the model's?"
        )


def check_stop_strings(params: SamplingParams, stops: StopStrings | None) -> None:
    """Refuse stop strings where nothing can decode tokens.

    Raises:
        ConfigurationError: there are stop strings and no tokenizer.
    """
    if params.stop_strings and stops is None:
        raise ConfigurationError(f"stop strings {params.stop_strings} need a sampler made with tokenizer=...")
