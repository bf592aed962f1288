"""How the starter is made: a tokenizer, random transcripts, and supervised training on the assistant's tokens only."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from envgrad.starter.tokenizer import ASSISTANT, END, build_tokenizer
from envgrad.starter.transcripts import Chat, Game, draw_chat, load_games

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the starter's weights."""

    seed: int = 0
    width: int = 64
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 1
    """one for all query heads: decoding many short rows is mostly attention over small matrices"""
    hidden: int = 192
    """width of the feed-forward layers"""
    steps: int = 600
    chats_per_step: int = 48
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    tokenizer_chats: int = 3000


def make_starter(
    folder: Path,
    *,
    examples: Path,
    recipe: Recipe | None = None,
    measured_tasks: int = 300,
    report: Callable[[str], None] = print,
) -> None:
    """Make the starter from a seed, save it to ``folder``, and play ``measured_tasks`` tasks of each environment.

    One seed gives one result on one machine and thread count; elsewhere float rounding differs.

    Raises:
        ConfigurationError: ``examples`` does not hold the example environments.
    """
    recipe = recipe or Recipe()
    games = load_games(examples)
    rng = random.Random(recipe.seed)
    tokenizer = make_tokenizer(rng, games, recipe.tokenizer_chats)
    torch.manual_seed(recipe.seed)
    model = new_model(tokenizer, recipe)
    report(f"{len(tokenizer)} tokens, {sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer, rng, games, recipe, report)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report(f"saved to {folder}")
    if measured_tasks:
        from envgrad.starter.figures import measure

        for name, game in games.items():
            report(str(measure(folder, name, game.factory, tasks=measured_tasks)))


def make_tokenizer(rng: random.Random, games: dict[str, Game], chats: int) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from ``chats`` transcripts."""
    blank = build_tokenizer([])
    return build_tokenizer(render(blank, draw_chat(rng, games)) for _ in range(chats))


def render(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> str:
    text = tokenizer.apply_chat_template(chat.messages, tools=chat.tools or None, tokenize=False)
    if not isinstance(text, str):
        raise AssertionError("one chat renders to one text")
    return text


def new_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> LlamaForCausalLM:
    """A random model: width^-0.5 as the initial deviation, which a model this narrow needs to learn quickly."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=recipe.width**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    games: dict[str, Game],
    recipe: Recipe,
    report: Callable[[str], None] = print,
) -> None:
    """Supervised training on fresh transcripts, each seen once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    started = time.perf_counter()
    for step in range(recipe.steps):
        warmup = (step + 1) / recipe.warmup_steps
        decay = (recipe.steps - step) / (recipe.steps - recipe.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, warmup, decay)
        chats = [draw_chat(rng, games) for _ in range(recipe.chats_per_step)]
        optimizer.zero_grad()
        loss = backward(model, tokenizer, chats)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            seconds = time.perf_counter() - started
            report(f"step {step + 1}/{recipe.steps}: loss {loss:.3f} per assistant token, {seconds:.0f} s")


def backward(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: Sequence[Chat], chunks: int = 4
) -> float:
    """Add the gradient of the mean cross-entropy (nats) of the assistant's tokens, the end of each turn included.

    Rows of like length share a chunk, which saves padding; the mean is over all chunks' tokens.
    """
    rows = tokenizer([render(tokenizer, chat) for chat in chats], add_special_tokens=False)["input_ids"]
    rows.sort(key=len)
    assistant, end = tokenizer.convert_tokens_to_ids([ASSISTANT, END])
    count = sum(int((assistant_labels(torch.tensor([row]), assistant, end) != IGNORED).sum()) for row in rows)
    total = 0.0
    size = math.ceil(len(rows) / chunks)
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        ids = pad_sequence([torch.tensor(row) for row in chunk], batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = assistant_labels(ids, assistant, end)[:, 1:]
        trained = labels != IGNORED
        # Padding stands at the end of a row, where no earlier token sees it.
        states = model.model(input_ids=ids).last_hidden_state[:, :-1][trained]
        loss = cross_entropy(model.lm_head(states), labels[trained], reduction="sum") / count
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def assistant_labels(ids: Tensor, assistant: int, end: int) -> Tensor:
    """``ids`` (rows, length) where the assistant speaks, from after its header to its end token, else ``IGNORED``.

    Example:
        >>> assistant_labels(torch.tensor([[5, 1, 7, 2, 6]]), assistant=1, end=2).tolist()
        [[-100, -100, 7, 2, -100]]
    """
    headers, ends = (ids == assistant).cumsum(1), (ids == end).cumsum(1)
    speaks = (headers > ends - (ids == end).long()) & (ids != assistant)
    return torch.where(speaks, ids, IGNORED)
