"""The modules of a Llama-like decoder, found by what they are: for forwards of our own over copies of its weights.

Which models have this shape is read from their modules and code (``known_forwards``); whether a forward gives their
numbers is found by comparing (``compatibility``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from envgrad.sampling.known_forwards import is_known_layer
from envgrad.sampling.limits import text_config
from envgrad.sampling.projections import Projection

MOST_BYTES = 2 << 30
"""models whose copies would take more memory run their own forward"""
KEPT_BYTES = 64 << 20
"""copies up to this size stay when nothing is sampled"""
_GROWING_ROTATIONS = ("dynamic", "longrope")
"""rotations that depend on the row's length"""


class OtherShape(Exception):
    """The model is not built as it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The modules of a model of pre-norm layers with rotary attention and a gated MLP, and its sizes.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> shape = DecoderShape.of(LlamaForCausalLM(config))
        >>> shape.heads, shape.kv_heads, shape.size, shape.mlp, shape.fits
        (4, 2, 4, 24, True)
    """

    body: nn.Module
    layers: tuple[nn.Module, ...]
    head: Projection
    rotary: nn.Module
    heads: int
    kv_heads: int
    size: int
    """numbers of a head"""
    mlp: int
    positions: int
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def stamp(self) -> tuple[object, ...]:
        """Differs from an earlier one if a weight was replaced or written to, or another adapter acts."""
        adapters = tuple(found.added for layer in self.layers for found in projections(layer))
        return (*((one.data_ptr(), one._version) for one in self.parameters), *adapters)

    @property
    def num_bytes(self) -> int:
        """Of the weights in float32."""
        return 4 * sum(one.numel() for one in self.parameters)

    @property
    def fits(self) -> bool:
        """Whether the module is as it must be: on the CPU, in float32, without hooks."""
        if any(module._forward_hooks or module._forward_pre_hooks for module in self.modules):
            return False
        try:
            if any(found.undone for layer in self.layers for found in projections(layer)):
                return False
        except OtherShape:  # a layer was replaced since
            return False
        plain = all(
            one.dtype == torch.float32 and one.device.type == "cpu" and not one.is_inference()
            for one in self.parameters
        )
        return plain and self.num_bytes <= MOST_BYTES

    @property
    def table(self) -> Tensor:
        """(V, width) the embeddings."""
        return tensor(child(self.body, "embed_tokens"), "weight").detach()

    @classmethod
    def of(cls, model: PreTrainedModel) -> DecoderShape:
        """
        Raises:
            OtherShape: a module is missing, or is another one.
        """
        config = text_config(model)
        body, head = child(model, "model"), linear(model, "lm_head")
        rotary, stack = child(body, "rotary_emb"), child(body, "layers")
        layers = tuple(stack.children())
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        kind = rotary.__dict__.get("rope_type")
        if not layers or kinds != {"full_attention"} or kind is None or any(one in kind for one in _GROWING_ROTATIONS):
            raise OtherShape
        if any(isinstance(getattr(one, "sliding_window", None), int) for one in (config, *_attentions(layers))):
            raise OtherShape
        first = _attentions(layers)[0]
        size, positions = first.__dict__.get("head_dim"), getattr(config, "max_position_embeddings", None)
        if not isinstance(size, int) or size % 2 or not isinstance(positions, int):
            raise OtherShape
        if not all(is_known_layer(layer) for layer in layers):
            raise OtherShape
        query, key = linear(first, "q_proj").base, linear(first, "k_proj").base
        shape = cls(
            body=body, layers=layers, head=head, rotary=rotary, size=size,
            heads=query.out_features // size, kv_heads=key.out_features // size,
            mlp=linear(child(layers[0], "mlp"), "gate_proj").base.out_features,
            positions=positions,
            modules=tuple(model.modules()), parameters=tuple(model.parameters()),
        )  # fmt: skip
        used = {id(one) for layer in layers for one in _weights_of(layer)}
        used |= {
            id(one) for one in (*child(model, "lm_head").parameters(), tensor(child(body, "embed_tokens"), "weight"))
        }
        used |= {id(tensor(child(body, "norm"), "weight"))}
        if {id(one) for one in shape.parameters} != used:  # it has weights that such a forward would not use
            raise OtherShape
        shape._check_sizes(vocabulary=int(config.vocab_size))
        return shape

    def _check_sizes(self, vocabulary: int) -> None:
        """Kernels read memory by the sizes alone, so a layer that was cut by hand must be found before they do.

        Raises:
            OtherShape: a weight has another size than the first layer's.
        """
        width, inner, outer = self.table.shape[1], self.heads * self.size, self.kv_heads * self.size
        expected = [(inner, width), (outer, width), (outer, width), (width, inner)]
        expected += [(self.mlp, width), (self.mlp, width), (width, self.mlp)]
        norms = [(child(self.body, "norm"), width)]
        for layer in self.layers:
            if [tuple(found.base.weight.shape) for found in projections(layer)] != expected:
                raise OtherShape
            norms += [(child(layer, one), width) for one in ("input_layernorm", "post_attention_layernorm")]
            norms += [(one, self.size) for one in head_norms(layer) if one is not None]
        if any(tuple(tensor(norm, "weight").shape) != (size,) for norm, size in norms):
            raise OtherShape
        head = tuple(self.head.base.weight.shape)
        if (
            head != (self.head.base.out_features, width)
            or self.table.shape[0] < max(vocabulary, head[0])  # whatever is sampled is looked up
            or self.heads % self.kv_heads
        ):
            raise OtherShape

    def rotation(self) -> tuple[Tensor, Tensor]:
        """(positions, size / 2) cosines and sines of the angles by which a head's halves are turned.

        Raises:
            OtherShape: the rotation is of another kind.
        """
        like = torch.zeros(1, dtype=torch.float32, device="cpu")
        cosine, sine = self.rotary(like, torch.arange(self.positions, device="cpu").unsqueeze(0))
        half = self.size // 2
        if cosine.shape[-1] != self.size or not torch.equal(cosine[..., :half], cosine[..., half:]):
            raise OtherShape
        return cosine[0, :, :half].float().contiguous(), sine[0, :, :half].float().contiguous()


def projections(layer: nn.Module) -> Iterator[Projection]:
    """The seven linear layers of a decoder layer."""
    attention, mlp = child(layer, "self_attn"), child(layer, "mlp")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield linear(attention, name)
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield linear(mlp, name)


def _weights_of(layer: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a layer that a forward of this shape reads."""
    for found in projections(layer):
        yield from (found.base if found.lora is None else found.lora).parameters()
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield tensor(child(layer, name), "weight")
    for name, norm in child(layer, "self_attn").named_children():
        if name in ("q_norm", "k_norm"):
            yield tensor(norm, "weight")


def _attentions(layers: tuple[nn.Module, ...]) -> list[nn.Module]:
    return [child(layer, "self_attn") for layer in layers]


def head_norms(layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms of a layer's queries and keys, where it has them."""
    found = dict(child(layer, "self_attn").named_children())
    return found.get("q_norm"), found.get("k_norm")


def epsilon_of(norm: nn.Module) -> float:
    """
    Raises:
        OtherShape: it is no RMS norm as they are written here.
    """
    epsilon = norm.__dict__.get("variance_epsilon")
    if not isinstance(epsilon, float):
        raise OtherShape
    return epsilon


def child(module: nn.Module, name: str) -> nn.Module:
    found = module._modules.get(name)
    if found is None:
        raise OtherShape
    return found


def linear(module: nn.Module, name: str) -> Projection:
    found = Projection.of(child(module, name))
    if found is None:
        raise OtherShape
    return found


def tensor(module: nn.Module, name: str) -> nn.Parameter:
    found = module._parameters.get(name)
    if found is None:
        raise OtherShape
    return found
