"""The floor: floating-point operations that a step cannot do without, and the seconds they take at the machine's rate.

A decoder layer of width ``d`` with ``H`` heads and ``K`` key-value heads of size ``h`` and an MLP of size ``f`` has

    W = d*H*h + 2*d*K*h + H*h*d + 3*d*f

weights (query, key and value, output, gated MLP). One token that attends to ``c`` tokens (itself included) costs, over
``L`` layers, ``L * (2*W + 4*H*h*c)`` operations: two for each weight, and two for each number in the products of query
with keys and of weights with values. Its logits cost ``2*d*V``. A backward costs twice its forward.

**Rollout**: each group's prompt once; each row's own tokens once (sampled ones and results alike), but for the row's
last token, which nothing follows. Logits for each sampled token; the first tokens of a group's siblings share theirs.
**Training**: the same tokens, forward and backward, with logits for the sampled tokens: three times the rollout.

Norms, activations, softmax, sampling and the optimizer are left out, so the floor is a little lower than the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide a Llama-like model's operations."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        attention = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.mlp

    def body(self, start: int, stop: int) -> int:
        """Operations of forwarding the tokens at positions ``start .. stop - 1`` of a row, without logits.

        Example:
            >>> shape = ModelShape(layers=1, width=2, heads=1, kv_heads=1, head_size=2, mlp=3, vocabulary=5)
            >>> shape.layer_weights, shape.body(0, 1), shape.body(2, 4)
            (34, 76, 192)
        """
        tokens = stop - start
        contexts = (stop * (stop + 1) - start * (start + 1)) // 2
        return self.layers * (2 * self.layer_weights * tokens + 4 * self.heads * self.head_size * contexts)

    def logits(self, positions: int) -> int:
        """Operations of the head at so many positions."""
        return 2 * self.width * self.vocabulary * positions


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSize:
    """One episode in tokens. Rows of one ``group`` have the same prompt."""

    group: int
    prompt: int
    sampled: int
    given: int
    """tool results and what the template writes around them"""

    @property
    def length(self) -> int:
        return self.prompt + self.sampled + self.given


def rollout_flops(shape: ModelShape, rows: Sequence[RowSize]) -> int:
    """Operations that sampling these rows must spend."""
    prompts = {row.group: row.prompt for row in rows}
    body = sum(shape.body(0, prompt) for prompt in prompts.values())
    body += sum(shape.body(row.prompt, row.length - 1) for row in rows)
    shared = len(rows) - len(prompts)
    return body + shape.logits(sum(row.sampled for row in rows) - shared)


def training_flops(shape: ModelShape, rows: Sequence[RowSize]) -> int:
    """Operations that a forward and a backward over these rows must spend."""
    return 3 * rollout_flops(shape, rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least a step can cost on this machine."""

    rollout: int
    """operations"""
    training: int
    rate: float
    """float32 operations per second of a large matmul, on the same threads"""

    @classmethod
    def of(cls, shape: ModelShape, rows: Sequence[RowSize], rate: float) -> Floor:
        return cls(rollout=rollout_flops(shape, rows), training=training_flops(shape, rows), rate=rate)

    def seconds(self, part: str = "step") -> float:
        """Seconds of ``rollout``, ``train``, or both (``step``)."""
        flops = {"rollout": self.rollout, "train": self.training, "step": self.rollout + self.training}[part]
        return flops / self.rate
