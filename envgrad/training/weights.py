"""What samplers are given of a policy: tensors by name, in the form that each takes.

::

    frozen_copy     a module of its own, for a sampler in this process: base model and adapters, each as it is
    module_weights  that module's tensors, under its own names
    policy_weights  plain names of the base model; LoRA adapters merged out of place, one tensor at a time
    adapter_weights the adapters alone, as peft saves them
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

    from envgrad.training.model import Policy


class LazyWeights(Mapping[str, Tensor]):
    """Tensors by name, each computed when it is read, so that no second model is ever held.

    Example:
        >>> weights = LazyWeights({"a": lambda: torch.ones(2)})
        >>> list(weights), weights["a"]
        (['a'], tensor([1., 1.]))
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> Tensor:
        with torch.no_grad():
            return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def frozen_copy(policy: Policy) -> PreTrainedModel:
    """A copy of the policy's transformers model with its adapters, without gradients: a sampler's own.

    It costs the memory of the weights once more, and nothing for gradients or optimizer.

    Raises:
        ConfigurationError: the model is quantized.
    """
    base = policy.base
    if base.__dict__.get("is_quantized"):
        raise ConfigurationError(
            f"asynchronous=True copies the weights for the sampler, and this {type(base).__name__} is quantized; train "
            "it with asynchronous=False, or load it in bfloat16"
        )
    copied: PreTrainedModel = copy.deepcopy(base)
    copied.eval().requires_grad_(False)
    return copied


def module_weights(policy: Policy) -> Mapping[str, Tensor]:
    """Every parameter and buffer of the policy's transformers model, adapters included, under the module's names."""
    found = policy.base.state_dict(keep_vars=True)
    # DeepSpeed's own mark of a weight that is cut (ds_id) does not survive detach
    weights: Mapping[str, Tensor] = {
        name: one if hasattr(one, "ds_id") or not isinstance(one, Tensor) else one.detach()
        for name, one in found.items()
    }
    return weights


def policy_weights(policy: Policy) -> Mapping[str, Tensor]:
    """The policy's weights under the base model's names, as ``save_pretrained`` of the merged model would have them.

    LoRA adapters are added to a copy of each weight when it is read; the policy is never changed.

    Raises:
        ConfigurationError: adapters of a kind that cannot be added to the weights here.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from envgrad.training.model import Policy
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1)
        >>> model = LlamaForCausalLM(config)
        >>> set(policy_weights(Policy(model=model, tokenizer=None))) == set(model.state_dict())
        True
    """
    base = policy.base
    if isinstance(policy.model, PreTrainedModel):
        return module_weights(policy)
    modules = dict(base.named_modules())
    makers: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in base.state_dict().items():
        plain, owner = _plain_name(name, modules)
        if plain is not None:
            makers[plain] = _maker(tensor, name, owner)
    return LazyWeights(makers)


def adapter_weights(policy: Policy) -> dict[str, Tensor]:
    """The trained adapters by name, as peft saves them; empty where the policy has none."""
    if isinstance(policy.model, PreTrainedModel):
        return {}
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(policy.model)
    return found


def _plain_name(name: str, modules: Mapping[str, nn.Module]) -> tuple[str | None, LoraLayer | None]:
    """The base model's name for a tensor, and the LoRA layer that adds to it; no name for what adapters add."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = modules.get(".".join(parts[:count]))
        own, rest = ".".join(parts[:count]), parts[count:]
        if isinstance(module, ModulesToSaveWrapper):
            active = module.active_adapters[0] if module.active_adapters else None
            kept = rest[:2] == ["modules_to_save", active] if active else rest[0] == "original_module"
            return (".".join([own, *rest[2 if active else 1 :]]) if kept else None), None
        if isinstance(module, BaseTunerLayer):
            if not isinstance(module, LoraLayer) or any(module.use_dora.values()) or any(module.lora_bias.values()):
                raise ConfigurationError(
                    f"{own} has adapters that are not plain LoRA ({type(module).__name__}), and only LoRA can be "
                    "merged for this sampler; use sampler='local', or plain LoRA"
                )
            if rest[0] != "base_layer":
                return None, None
            return ".".join([own, *rest[1:]]), module
    return name, None


def _maker(tensor: Tensor, name: str, layer: LoraLayer | None) -> Callable[[], Tensor]:
    if layer is None or not name.endswith(".weight"):
        return lambda: tensor
    own: Any = layer

    def merged() -> Tensor:
        total = tensor
        for adapter in own.active_adapters if not own.disable_adapters and not own.merged else ():
            if adapter in own.scaling:
                total = total + own.get_delta_weight(adapter).to(total)
        return total

    return merged
