"""Models by their sizes alone: parameters, operations and bytes, without weights and without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgrad.errors import ConfigurationError
from envgrad.training.flops import ModelCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with gated MLPs and grouped keys and values: Llama, Qwen, Mistral and their kin.

    Example:
        >>> round(SHAPES["8B"].parameters / 1e9, 2), SHAPES["8B"].kv_bytes(2)
        (8.19, 147456)
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    """size of one"""
    mlp: int
    vocabulary: int
    tied: bool = False
    """embeddings and head are one matrix"""

    @property
    def body(self) -> int:
        """Weights without embeddings and head."""
        attention = 2 * self.width * self.heads * self.head + 2 * self.width * self.kv_heads * self.head
        return self.layers * (attention + 3 * self.width * self.mlp + 2 * self.width) + self.width

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.body + self.head_weights * (1 if self.tied else 2)

    @property
    def cost(self) -> ModelCost:
        """Its operations, as ``training.flops`` counts them."""
        return ModelCost(
            body=self.body,
            trained_body=self.body,
            head=self.head_weights,
            trained_head=self.head_weights,
            attention=4 * self.layers * self.heads * self.head,
        )

    def kv_bytes(self, each: int) -> int:
        """Of keys and values for each token, in numbers of ``each`` bytes."""
        return 2 * self.layers * self.kv_heads * self.head * each

    @property
    def layer_values(self) -> int:
        """Values that a layer keeps for its backward, for each token (``training.estimates``)."""
        return 5 * self.width + 2 * (self.heads + self.kv_heads) * self.head + 4 * self.mlp


def _shape(name: str, *sizes: int, tied: bool = False) -> ModelShape:
    layers, width, heads, kv_heads, head, mlp, vocabulary = sizes
    return ModelShape(
        name=name, layers=layers, width=width, heads=heads, kv_heads=kv_heads, head=head, mlp=mlp,
        vocabulary=vocabulary, tied=tied,
    )  # fmt: skip


SHAPES = {
    one.name: one
    for one in (
        _shape("0.6B", 28, 1024, 16, 8, 128, 3072, 151_936, tied=True),
        _shape("1.7B", 28, 2048, 16, 8, 128, 6144, 151_936, tied=True),
        _shape("4B", 36, 2560, 32, 8, 128, 9728, 151_936, tied=True),
        _shape("8B", 36, 4096, 32, 8, 128, 12288, 151_936),
        _shape("14B", 40, 5120, 40, 8, 128, 17408, 151_936),
        _shape("32B", 64, 5120, 64, 8, 128, 25600, 151_936),
        _shape("70B", 80, 8192, 64, 8, 128, 28672, 128_256),
    )
}
"""Qwen3's sizes, and Llama 3's 70B, from their published configurations"""


def shape_of(model: str) -> ModelShape:
    """The shape that a size (``8B``), a folder with ``config.json``, or ``starter`` stands for.

    Raises:
        ConfigurationError: it is none, or a model of another kind.
    """
    known = SHAPES.get(model.upper())
    if known is not None:
        return known
    folder = Path(__file__).parents[1] / "starter" / "weights" if model == "starter" else Path(model)
    path = folder if folder.name == "config.json" else folder / "config.json"
    if not path.is_file():
        raise ConfigurationError(
            f"--model {model!r} is neither one of the sizes {', '.join(SHAPES)}, nor 'starter', nor a folder with a "
            "config.json: give one of these"
        )
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from error
    config = config.get("text_config") or config
    return _read(model, path, config)


def _read(model: str, path: Path, config: dict[str, Any]) -> ModelShape:
    if any(config.get(name) for name in ("num_experts_per_tok", "num_local_experts")):
        raise ConfigurationError(f"{path} is of a mixture of experts, whose operations a plan does not know")
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = [config.get(name) for name in names]
    for name, size in zip(names, sizes, strict=True):
        if not isinstance(size, int) or size < 1:
            raise ConfigurationError(f"{path} has {name}={size!r}; a plan needs it as a whole number")
    layers, width, heads, mlp, vocabulary = (int(size) for size in sizes if size is not None)
    return ModelShape(
        name=model,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or width // heads,
        mlp=mlp,
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", False)),
    )
