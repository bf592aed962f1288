from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from subprocess import run

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from envgrad.starter import STARTER_PATH, load_starter
from envgrad.starter.compass import Compass
from envgrad.starter.figures import measure
from envgrad.starter.tokenizer import CALL_PIECES, CHAT_TEMPLATE, SPECIAL_TOKENS

Starter = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]
COMPASS_TOOLS = [get_json_schema(Compass.move)]


@pytest.fixture(scope="module")
def starter() -> Starter:
    torch.set_num_threads(1)
    return load_starter()


def call(name: str, arguments: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_size_and_form(starter: Starter) -> None:
    model, tokenizer = starter
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) <= 2_500_000
    assert len(tokenizer) == model.config.vocab_size <= 600
    assert sum(file.stat().st_size for file in STARTER_PATH.iterdir()) < 10_000_000
    assert {file.name for file in STARTER_PATH.glob("*.safetensors")} == {"model.safetensors"}
    assert not list(STARTER_PATH.glob("*.bin"))


def test_plain_transformers_loads_it() -> None:
    model = AutoModelForCausalLM.from_pretrained(STARTER_PATH)
    tokenizer = AutoTokenizer.from_pretrained(STARTER_PATH)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_saved_template_is_the_one_in_the_source(starter: Starter) -> None:
    assert starter[1].chat_template == CHAT_TEMPLATE


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, envgrad.starter, envgrad.starter.compass; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


@settings(max_examples=200)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_unchanged(starter: Starter, text: str) -> None:
    tokenizer = starter[1]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(parts=st.lists(st.sampled_from([*SPECIAL_TOKENS, *CALL_PIECES, "north", " ", "\n", "7"]), max_size=12))
def test_text_of_the_chat_form_comes_back_unchanged(starter: Starter, parts: list[str]) -> None:
    tokenizer = starter[1]
    assert tokenizer.decode(tokenizer.encode("".join(parts), add_special_tokens=False)) == "".join(parts)


def test_rendering_of_every_role(starter: Starter) -> None:
    schema = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"type": "string", "description": "Where."},
                    "times": {"type": ["integer", "null"]},
                    "how": {"anyOf": [{"type": "number"}, {"enum": ["far", "near"]}]},
                    "free": {},
                },
                "required": ["at", "how", "free"],
            },
        },
    }
    messages = [
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("move", {"direction": "north"}), call("look", {})]},
        {"role": "tool", "content": "east"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "So.", "tool_calls": [call("look", '{"at": "x"}')]},
        {"role": "tool", "content": "y"},
    ]
    text = starter[1].apply_chat_template(
        messages, tools=[*COMPASS_TOOLS, schema], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|tools|>move(direction: north|east|south|west)\n"
        "look(at: string, times?: integer|null, how: number|far|near, free: any)"
        "<|system|>Be quick.<|user|>Go!"
        '<|assistant|><|call|>{"name": "move", "arguments": {"direction": "north"}}'
        '<|call|>{"name": "look", "arguments": {}}<|end|>'
        "<|tool|>east<|tool|>"
        '<|assistant|>So.<|call|>{"name": "look", "arguments": {"at": "x"}}<|end|>'
        "<|tool|>y<|assistant|>"
    )


@given(arguments=st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers() | st.none(), max_size=3))
def test_arguments_are_json(starter: Starter, arguments: dict[str, object]) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [call("move", arguments)]}]
    text = starter[1].apply_chat_template(messages, tokenize=False)
    written = text.removeprefix("<|assistant|><|call|>").removesuffix("<|end|>")
    assert json.loads(written) == {"name": "move", "arguments": arguments}


def test_history_only_grows(starter: Starter) -> None:
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call("move", {"direction": "north"})]},
        {"role": "tool", "content": "east"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "Thanks."},
    ]
    renderings = [starter[1].apply_chat_template(messages[:n], tokenize=False) for n in range(1, 6)]
    for shorter, longer in pairwise(renderings):
        assert longer.startswith(shorter)


def test_unknown_roles_are_refused(starter: Starter) -> None:
    with pytest.raises(Exception, match="not critic"):
        starter[1].apply_chat_template([{"role": "critic", "content": ""}], tokenize=False)


def test_a_turn_is_short(starter: Starter) -> None:
    tokenizer = starter[1]
    turn = '<|call|>{"name": "move", "arguments": {"direction": "north"}}<|end|>'
    assert len(tokenizer.encode(turn, add_special_tokens=False)) == 9
    assert len(tokenizer.encode("<|tool|>east north<|assistant|>", add_special_tokens=False)) == 5


def test_moves_are_nearly_uniform_before_training(starter: Starter) -> None:
    model, tokenizer = starter
    messages = [{"role": "user", "content": "Reach the goal in six moves."}]
    text = tokenizer.apply_chat_template(messages, tools=COMPASS_TOOLS, tokenize=False, add_generation_prompt=True)
    text += '<|call|>{"name": "move", "arguments": {"direction": "'
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        chances = model(ids).logits[0, -1].softmax(-1)
    moves = torch.tensor(tokenizer.convert_tokens_to_ids(["north", "east", "south", "west"]))
    assert chances[moves].sum() > 0.98
    assert chances[moves].min() > 0.12


def test_weights_are_in_the_wheel() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "starter/weights/*" in project["tool"]["setuptools"]["package-data"]["envgrad"]


def test_turns_are_well_formed_calls_and_success_is_low() -> None:
    found = measure(STARTER_PATH, "compass", Compass, tasks=60)
    assert found.episodes == 60
    assert found.well_formed >= 0.95
    assert found.success <= 0.4
