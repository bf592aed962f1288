from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from envgrad.starter import load_starter
from envgrad.starter.recipe import (
    IGNORED,
    Recipe,
    assistant_labels,
    backward,
    make_starter,
    make_tokenizer,
    new_model,
    render,
)
from envgrad.starter.transcripts import Chat, Game, draw_chat, load_games

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = Recipe(width=16, heads=2, hidden=16, steps=3, chats_per_step=8, warmup_steps=1, tokenizer_chats=200)


@pytest.fixture(scope="module")
def games() -> dict[str, Game]:
    torch.set_num_threads(1)
    return load_games(EXAMPLES)


def test_only_the_assistants_tokens_are_labels(games: dict[str, Game]) -> None:
    tokenizer = make_tokenizer(random.Random(0), games, 100)
    call = {"type": "function", "function": {"name": "move", "arguments": {"direction": "north"}}}
    chat = Chat(
        messages=[
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "east"},
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "Bye."},
        ],
        tools=[],
    )
    ids = torch.tensor([tokenizer.encode(render(tokenizer, chat), add_special_tokens=False)])
    labels = assistant_labels(ids, *tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"]))[0]
    assert tokenizer.decode(labels[labels != IGNORED]) == (
        '<|call|>{"name": "move", "arguments": {"direction": "north"}}<|end|>done<|end|>'
    )


def test_gradient_is_that_of_the_mean_whatever_the_chunks(games: dict[str, Game]) -> None:
    rng = random.Random(1)
    tokenizer = make_tokenizer(rng, games, 100)
    torch.manual_seed(0)
    model = new_model(tokenizer, SMALL)
    chats = [draw_chat(rng, games) for _ in range(7)]
    whole = backward(model, tokenizer, chats, chunks=1)
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    assert backward(model, tokenizer, chats, chunks=7) == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, gradient, rtol=1e-4, atol=1e-6)
    # One chat at a time, without padding, through the model's own loss.
    total = torch.zeros(())
    count = 0
    for chat in chats:
        ids = torch.tensor([tokenizer.encode(render(tokenizer, chat), add_special_tokens=False)])
        labels = assistant_labels(ids, *tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"]))
        trained = int((labels != IGNORED).sum())
        total += model(input_ids=ids, labels=labels).loss.detach() * trained
        count += trained
    assert whole == pytest.approx(float(total) / count, rel=1e-5)


def test_new_models_are_random_with_the_width_s_deviation(games: dict[str, Game]) -> None:
    tokenizer = make_tokenizer(random.Random(2), games, 100)
    torch.manual_seed(0)
    model = new_model(tokenizer, Recipe())
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.125, rel=0.05)


def test_a_seed_makes_the_same_files_again(games: dict[str, Game], tmp_path: Path) -> None:
    lines: list[str] = []
    for name in ("a", "b"):
        make_starter(tmp_path / name, examples=EXAMPLES, recipe=SMALL, measured_tasks=0, report=lines.append)
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert any("parameters" in line for line in lines)


def test_the_shipped_tokenizer_is_the_recipe_s(games: dict[str, Game]) -> None:
    recipe = Recipe()
    made = make_tokenizer(random.Random(recipe.seed), games, recipe.tokenizer_chats)
    assert made.get_vocab() == load_starter()[1].get_vocab()
