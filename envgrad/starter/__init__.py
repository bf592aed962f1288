"""The small language model that ships with the package: it writes well-formed tool calls and knows no strategy.

``model="starter"`` stands for :data:`STARTER_PATH`, a folder that plain ``transformers`` loads. ``python -m
envgrad.starter`` makes it again from a seed (:mod:`envgrad.starter.recipe`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["STARTER_PATH", "load_starter"]

STARTER_PATH = Path(__file__).parent / "weights"
"""configuration, weights (safetensors), tokenizer and chat template"""


def load_starter() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The starter model in float32 on the CPU, and its tokenizer.

    Example:
        >>> model, tokenizer = load_starter()
        >>> model.config.vocab_size == len(tokenizer)
        True
    """
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    model = LlamaForCausalLM.from_pretrained(STARTER_PATH)
    return model, PreTrainedTokenizerFast.from_pretrained(STARTER_PATH)
