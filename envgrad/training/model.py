"""From what the user gives as ``model`` to a policy, its tokenizer and its reference."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from envgrad.distributed.sharded import whole
from envgrad.errors import ConfigurationError, first_line

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

    from envgrad.config import RolloutConfig

STARTER = "starter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model to train, as transformers (or peft) made it, with its tokenizer."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def base(self) -> PreTrainedModel:
        """The transformers model inside, without adapters' wrapper."""
        return base_model(self.model)

    @property
    def vocab_size(self) -> int:
        """How many token ids it can read."""
        return int(self.base.config.get_text_config().vocab_size)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model in ``model``, which may be a peft wrapper around it."""
    if isinstance(model, PreTrainedModel):
        return model
    inner = model.get_base_model()  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel):
        raise ConfigurationError(f"model is a {type(inner).__name__}; it must be a transformers causal language model")
    return inner


def load_policy(
    model: str | Path | PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None,
    config: RolloutConfig,
    peft_config: PeftConfig | None,
    quantization_config: object = None,
) -> Policy:
    """Load what has to be loaded, check it, and put adapters on it where asked.

    Raises:
        ConfigurationError: a path or name that cannot be loaded, ``model_init_kwargs`` beside a ready model, a
            processor, no tokenizer, or ``peft_config`` for a model that already has adapters.
    """
    if isinstance(tokenizer, ProcessorMixin):
        raise ConfigurationError(
            f"processing_class is a {type(tokenizer).__name__}, which handles images or audio; episodes are text only. "
            "Pass its tokenizer and a text model"
        )
    if isinstance(model, (str, Path)):
        kwargs = config.mapping("model_init_kwargs") or {}
        if quantization_config is not None:
            if "quantization_config" in kwargs:
                raise ConfigurationError("quantization_config is in model_init_kwargs too; give it in one place")
            kwargs["quantization_config"] = quantization_config
        source = model_source(str(model), kwargs)
        loaded_model = _load_model(source, kwargs, config)
        loaded_tokenizer = tokenizer or load_tokenizer(source, kwargs, config)
    else:
        if quantization_config is not None:
            raise ConfigurationError(
                f"quantization_config cannot act: model is a loaded {type(model).__name__}; pass its name or path"
            )
        if config.model_init_kwargs is not None:
            raise ConfigurationError(
                f"model_init_kwargs={config.model_init_kwargs} cannot act: model is a loaded {type(model).__name__}. "
                "Pass its name or path, or drop model_init_kwargs"
            )
        loaded_model = model
        loaded_tokenizer = tokenizer or load_tokenizer(base_model(model).config._name_or_path, {}, config)
    if peft_config is not None:
        loaded_model = _add_adapters(loaded_model, peft_config)
    if config.disable_dropout:
        _disable_dropout(loaded_model)
    _check_trainable(loaded_model)
    return Policy(model=loaded_model, tokenizer=loaded_tokenizer)


def model_source(name: str, kwargs: dict[str, Any]) -> str:
    """Where to load from; ``starter`` and ``*.gguf`` files are known, a path that is not there is an error."""
    if name == STARTER:
        from envgrad.starter import STARTER_PATH

        return str(STARTER_PATH)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        kwargs.setdefault("gguf_file", path.name)
        return str(path.parent)
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if looks_like_path and not path.exists():
        raise ConfigurationError(
            f"model={name!r} does not exist; give a folder with a config.json, a name, or 'starter'"
        )
    return str(path) if path.exists() else name


def _load_model(source: str, kwargs: Mapping[str, Any], config: RolloutConfig) -> PreTrainedModel:
    options = {"dtype": torch.float32, "trust_remote_code": config.trust_remote_code} | dict(kwargs)
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model={source!r} cannot be loaded: {first_line(error)}") from error
    if "gguf_file" in options:
        _forget_quantization(loaded)
    return loaded


def _forget_quantization(model: PreTrainedModel) -> None:
    """transformers expands a GGUF file to plain weights and still calls the model quantized, which forbids training."""
    for name in ("is_quantized", "quantization_method", "hf_quantizer"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)  # a saved folder is a plain one


def load_tokenizer(source: str, kwargs: Mapping[str, Any], config: RolloutConfig) -> PreTrainedTokenizerBase:
    if not source:
        raise ConfigurationError("the model does not say where it came from; pass its tokenizer as processing_class")
    names = ("gguf_file", "revision", "subfolder", "cache_dir", "token", "local_files_only")
    shared = {key: kwargs[key] for key in names if key in kwargs}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code, **shared
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no tokenizer can be loaded from {source!r} ({first_line(error)}); pass one as processing_class"
        ) from error
    return tokenizer


def _dropout_rates(module: nn.Module) -> list[str]:
    """Names of the attributes that hold a dropout rate above 0: of dropout modules, and plain floats in any other."""
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and ("drop" in name or (is_dropout and name == "p"))
    ]


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for name in _dropout_rates(module):
            setattr(module, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether a training forward of ``model`` is random."""
    return any(_dropout_rates(module) for module in model.modules())


def is_half_precision(model: nn.Module) -> bool:
    """Whether any weight has so few bits that two ways to compute a log-prob differ visibly."""
    return any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())


def _add_adapters(model: PreTrainedModel | PeftModel, peft_config: PeftConfig) -> PeftModel:
    try:
        from peft import PeftModel, get_peft_model
    except ImportError as error:
        raise ConfigurationError("peft_config needs the peft package: pip install 'envgrad[peft]'") from error
    if isinstance(model, PeftModel):
        raise ConfigurationError("peft_config was given for a model that already has adapters; pass one or the other")
    if peft_config.is_prompt_learning:
        raise ConfigurationError(
            f"peft_config is a {type(peft_config).__name__}: virtual tokens cannot be kept in shared prompts; use LoRA"
        )
    adapted: PeftModel = get_peft_model(model, peft_config)
    return adapted


def _check_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError("no parameter of the model requires a gradient; unfreeze it or pass a peft_config")


class Reference:
    """The policy that ``beta`` holds the trained one to: adapters off, or a frozen copy of the first weights."""

    def __init__(self, model: nn.Module) -> None:
        self._policy = model
        self._adapters = not isinstance(model, PreTrainedModel)
        self._copy: nn.Module | None = None
        if not self._adapters:
            self._copy = copy.deepcopy(model).eval().requires_grad_(False)

    @property
    def is_copy(self) -> bool:
        """Whether it has weights of its own."""
        return self._copy is not None

    def weights(self) -> dict[str, torch.Tensor]:
        """Its own weights by name; none where it is the policy with adapters off."""
        return {} if self._copy is None else dict(self._copy.named_parameters())

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.weights().items():
            parameter.copy_(weights[name])

    @torch.no_grad()
    def mix(self, alpha: float) -> None:
        """``reference = alpha * policy + (1 - alpha) * reference``, weight by weight."""
        policy = dict(self._policy.named_parameters())
        for name, parameter in self.weights().items():
            parameter.lerp_(whole(policy[name]).to(parameter), alpha)

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The module to run for the reference's log-probs; the policy's mode is put back afterwards."""
        if self._copy is not None:
            yield self._copy
            return
        training = self._policy.training
        self._policy.eval()
        try:
            with self._policy.disable_adapter():  # type: ignore[operator]
                yield self._policy
        finally:
            self._policy.train(training)
