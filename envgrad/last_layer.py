"""The last decoder layer, past its keys and values, for the tokens that predict something only.

Prompts and tool results predict nothing that is trained: in the last layer they are needed as keys and values, and
nothing reads what comes out for them. There, queries, the feed-forward part and the final norm are left out for them,
forward and backward. Exact: every other number is the same.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from envgrad.attention import AttentionCall
from envgrad.layout import PackedLayout

PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
"""of a layer ``x += attention(norm(x)); x += mlp(norm(x))``; whether it is put together so is found by comparing"""

WORTHWHILE = 0.9
"""greatest share of predicting tokens for which the rest is left out: choosing rows costs a little too"""


class Predicting:
    """A row of which only the tokens ``wanted`` are read behind the last layer (``attention.AttentionLayout``).

    Not a dataclass on purpose: FSDP rebuilds dataclasses that it finds among a forward's arguments.
    """

    __slots__ = ("last", "layout", "wanted")

    def __init__(self, layout: PackedLayout, wanted: Tensor) -> None:
        self.layout = layout
        self.wanted = wanted
        """``(W,)`` int64, ascending and different"""
        self.last = layout.of_queries(wanted)
        """for the last layer"""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.layout.attend(call, query, key, value)


class LastLayer:
    """The last layer's ``forward``: for a row of ``Predicting`` it returns those tokens only, else what it always did.

    It lives in the layer's ``__dict__`` and knows the layer as an ordinary attribute, so a deep copy or a pickle of the
    model carries one of its own.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def _plain(self) -> Any:
        return MethodType(type(self.layer).forward, self.layer)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        row = kwargs.get("attention_layout")
        output: Tensor
        if not isinstance(row, Predicting):
            output = self._plain()(hidden_states, *args, **kwargs)
            return output
        layer: Any = self.layer
        if args or (layer.training and getattr(layer, "gradient_checkpointing", False)):
            output = self._plain()(hidden_states, *args, **kwargs)
            return output.index_select(1, row.wanted)
        kwargs["attention_layout"] = row.last
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        output = hidden_states.index_select(1, row.wanted) + attended.index_select(1, row.wanted)
        output = output + layer.mlp(layer.post_attention_layernorm(output))
        return output


def install_last_layer(model: PreTrainedModel) -> LastLayer | None:
    """Put a ``LastLayer`` into ``model``, if its last layer has the parts that it knows; returns it, or None."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return None
    layer = layers[-1]
    present = vars(layer).get("forward")
    if isinstance(present, LastLayer):
        return present
    if present is not None or {name for name, _ in layer.named_children()} != PARTS:
        return None
    layer.forward = LastLayer(layer)
    return layer.forward


def remove_last_layer(model: PreTrainedModel) -> None:
    """Take it out again, unless someone has wrapped it since."""
    layers = getattr(model.base_model, "layers", None)
    if isinstance(layers, nn.ModuleList) and len(layers) and isinstance(vars(layers[-1]).get("forward"), LastLayer):
        del layers[-1].forward
