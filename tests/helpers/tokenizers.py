"""Tiny tokenizers for tests, built on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ '# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and tools and loop.first %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>\n' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Plain ChatML with a newline behind the end-of-turn token, and calls in Hermes form."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>")
_LINES = (
    "hello hello hell he he he llo llo all the tools",
    '<tool_call>\n{"name": "inc", "arguments": {"n": 1}}\n</tool_call> "name": "arguments": user assistant system tool',
    "<think>\nthinking\n</think>\n\nthe answer is 1 2 3 4 5 6 7 8 9 0",
)


@cache
def _trained(specials: tuple[str, ...], vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(specials),
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for line in _LINES for _ in range(4)], trainer)
    return str(tokenizer.to_str())


def bpe_tokenizer(
    template: str | None = None,
    *,
    specials: Sequence[str] = SPECIAL_TOKENS,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
    bos: str | None = None,
    adds_bos: bool = False,
    vocab_size: int = 400,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges, so that one text has several encodings.

    ``pad=eos`` gives the tokenizer whose padding is its end of turn; ``adds_bos`` one that writes ``bos`` by itself.
    """
    every = tuple(dict.fromkeys([*specials, eos, pad, *([bos] if bos else [])]))
    backend = Tokenizer.from_str(_trained(every, vocab_size))
    if adds_bos:
        if bos is None:
            raise ValueError("adds_bos=True needs a bos token, got bos=None")
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, backend.token_to_id(bos))]
                ),
            ]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=pad, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def chatml_tokenizer(**options: object) -> PreTrainedTokenizerFast:
    """``bpe_tokenizer`` with the plain ChatML template."""
    return bpe_tokenizer(CHATML, **options)  # type: ignore[arg-type]
