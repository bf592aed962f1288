"""Whether a decoder's modules compute what those of Llama do, and nothing beside it, as far as their code can tell.

Numbers of a small random row show most differences, but not what acts later in a row (a scale that grows with the
position) or only in training (a dropout). So a ``forward`` is taken for a known one if it names nothing else.
"""

from __future__ import annotations

import inspect
from types import CodeType

from torch import nn

_ATTENTION = {
    "ALL_ATTENTION_FUNCTIONS", "_attn_implementation", "apply_rotary_pos_emb", "attention_dropout", "config",
    "contiguous", "eager_attention_forward", "get_interface", "getattr", "head_dim", "k_norm", "k_proj", "layer_idx",
    "o_proj", "q_norm", "q_proj", "reshape", "scaling", "shape", "sliding_window", "training", "transpose", "update",
    "v_proj", "view",
}  # fmt: skip
_MLP = {"act_fn", "down_proj", "gate_proj", "up_proj"}
_LAYER = {"input_layernorm", "mlp", "post_attention_layernorm", "self_attn"}
_NORM = {"dtype", "float32", "mean", "pow", "rsqrt", "to", "torch", "variance_epsilon", "weight"}


def is_known_layer(layer: nn.Module) -> bool:
    """Whether ``layer`` has the parts of a Llama's layer, and their classes' forwards name nothing that those do not.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...     num_attention_heads=1)
        >>> layer = LlamaForCausalLM(config).model.layers[0]
        >>> is_known_layer(layer), is_known_layer(layer.mlp)
        (True, False)
    """
    parts = dict(layer.named_children())
    if set(parts) != _LAYER:
        return False
    attention, mlp = (dict(parts[name].named_children()) for name in ("self_attn", "mlp"))
    if set(mlp) != _MLP or set(attention) - _ATTENTION:
        return False
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    norms += [one for name, one in attention.items() if name in ("q_norm", "k_norm")]
    known = [(layer, _LAYER), (parts["self_attn"], _ATTENTION), (parts["mlp"], _MLP), *((one, _NORM) for one in norms)]
    return all(_names(module) <= names for module, names in known)


def _names(module: nn.Module) -> set[str]:
    """Globals and attributes that the class's forward names, its inner functions' as well."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not isinstance(code, CodeType):
        return {"?"}
    found, left = set[str](), [code]
    while left:
        one = left.pop()
        found |= set(one.co_names)
        left += [const for const in one.co_consts if isinstance(const, CodeType)]
    return found
