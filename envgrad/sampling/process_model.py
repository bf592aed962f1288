"""A model as plain data: what another process needs to build it, given its weights. No object of the user travels."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import init_hf_modules
from transformers.initialization import no_init_weights

from envgrad.attention import IMPLEMENTATION
from envgrad.errors import ConfigurationError

_REMOTE = "transformers_modules"
"""where transformers keeps the code of models that come with their own"""


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Class, configuration, type and device of ``model``, as JSON data.

    Raises:
        ConfigurationError: another process cannot build it.
    """
    if model.__dict__.get("is_quantized"):
        raise ConfigurationError(
            f"{type(model).__name__} is quantized, and cannot be built anew from plain weights in the sampler's "
            "process; use sampler='local'"
        )
    attention = str(model.config._attn_implementation)
    return {
        "model": _place(type(model)),
        "config": _place(type(model.config)),
        "values": json.loads(model.config.to_json_string(use_diff=False)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": None if attention == IMPLEMENTATION else attention,
    }


def _place(kind: type) -> list[str]:
    """Where another process finds a class."""
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigurationError(
            f"{kind.__qualname__} is defined in {kind.__module__}, where the sampler's process cannot import it; put "
            "it into a module of its own, or use sampler='local'"
        )
    return [kind.__module__, kind.__qualname__]


def build_model(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model that ``describe_model`` told of, with these weights.

    Raises:
        ConfigurationError: it has other weights than these.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1))
        >>> twin = build_model(describe_model(model), model.state_dict())
        >>> torch.equal(twin.lm_head.weight, model.lm_head.weight)
        True
    """
    model_class = _find(description["model"], PreTrainedModel)
    config_class = _find(description["config"], PreTrainedConfig)
    config: Any = config_class.from_dict(dict(description["values"]))
    options = {} if description["attention"] is None else {"attn_implementation": description["attention"]}
    with no_init_weights():
        model: PreTrainedModel = model_class._from_config(config, dtype=getattr(torch, description["dtype"]), **options)
    model.tie_weights()
    _put(model, tensors)
    return model.to(description["device"]).eval().requires_grad_(False)


def _find(place: list[str], base: type) -> Any:
    module, qualname = place
    if module.split(".")[0] == _REMOTE:
        init_hf_modules()
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigurationError(f"{module}.{qualname} is no {base.__name__}")
    return found


def _put(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    own = model.state_dict(keep_vars=True)
    if missing := sorted(own.keys() - tensors.keys()) or sorted(tensors.keys() - own.keys()):
        raise ConfigurationError(
            f"{type(model).__name__} built from its configuration and the trainer's model do not have the same "
            f"weights: {missing[0]!r} ({len(missing)} in all); use sampler='local'"
        )
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise ConfigurationError(
                f"{name!r} has shape {tuple(own[name].shape)} by the model's configuration, and "
                f"{tuple(tensor.shape)} in the trainer's; use sampler='local'"
            )
        own[name].data = tensor.clone()  # its type may differ from the model's


def sendable_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """``tokenizer``, or None where ``describe_tokenizer`` would refuse it."""
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    """What decoding needs of ``tokenizer``, as JSON data.

    Raises:
        ConfigurationError: it has no backend of the tokenizers library.
    """
    if tokenizer is None:
        return None
    fast = sendable_tokenizer(tokenizer)
    if fast is None:
        raise ConfigurationError(
            f"stop strings are found in decoded text, and a {type(tokenizer).__name__} cannot go to the sampler's "
            "process; use a tokenizer with a backend of the tokenizers library, no stop_strings, or sampler='local'"
        )
    return {
        "backend": fast.backend_tokenizer.to_str(),
        "clean_up_tokenization_spaces": bool(fast.clean_up_tokenization_spaces),
    }


def build_tokenizer(description: Mapping[str, Any] | None) -> PreTrainedTokenizerBase | None:
    """A tokenizer that decodes as the described one does."""
    if description is None:
        return None
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(description["backend"])
    clean = description["clean_up_tokenization_spaces"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=clean)
