"""Anything may come in: sampled text, chats, configurations, rows, weight files, checkpoints. What cannot be used is
told by an error of ours, or one that the contract names; nothing else is ever raised.

``ENVGRAD_LONG=1`` tries 100,000 inputs in all, else a few hundred of each kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save

from envgrad.chat.renderer import ChatRenderer
from envgrad.chat.tool_calls import PARSERS
from envgrad.cli.train import build_config, read_request
from envgrad.environments.contract import inspect_environment
from envgrad.environments.results import opening_messages, read_reward, row_messages
from envgrad.environments.tasks import build_task_stream
from envgrad.environments.tools import build_tool, check_arguments
from envgrad.errors import ConfigurationError, EnvgradError
from envgrad.training.saved import GROUPS, STATE_NAME, STEPS, read_state, read_tensors, write_state
from helpers.tokenizers import CHATML, bpe_tokenizer
from helpers.trainers import Kind

LONG = bool(os.environ.get("ENVGRAD_LONG"))
SHARE = {
    "call forms": 0.40, "turns": 0.10, "arguments": 0.15, "rows": 0.10, "rewards": 0.10, "chats": 0.03, "options": 0.03,
    "yaml": 0.03, "weights": 0.03, "checkpoints": 0.03,
}  # fmt: skip


def bounded(kind, ordinary=150):
    count = round(100_000 * SHARE[kind]) if LONG else ordinary
    quiet = settings(
        max_examples=count, deadline=timedelta(seconds=20), database=None, suppress_health_check=list(HealthCheck)
    )
    return lambda test: pytest.mark.timeout(3600)(seed(20)(quiet(test)))


TOKENS = [
    "<tool_call>", "</tool_call>", "<tools>", "[TOOL_CALLS]", "[ARGS]", "<function=inc>", "</function>", "<think>",
    "<parameter=n>", "</parameter>", "</think>", "<|python_tag|>", "<|channel|>commentary to=functions.inc",
    "<|message|>", "<|call|>", "```json", "```", '{"name": "inc", "arguments": {"n": 1}}', '{"name":', "{", "}", "[",
    "]", '"', "\\", "inc(", "n=1)", ",", ":", "\n", "null", "NaN", "1e999", "\ud800", "\x00", "é", "<", ">", "=",
    "<|im_end|>", "<|im_start|>", "'", "((((", "{{{{", "[[[[", "\\u12", "call:inc", "tool_name", "arguments",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(TOKENS) | st.text(max_size=8), max_size=24).map("".join)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ANY = JSON | st.binary(max_size=8) | st.tuples(LEAVES) | st.complex_numbers() | st.dates() | st.sets(st.integers())


def inc(n: int, by: float = 1.0, words: list[str] | None = None) -> str:
    """
    Add.

    Args:
        n: How much.
        by: Times.
        words: Said.
    """
    return str(n)


TOOL = build_tool("inc", inc)


@bounded("call forms")
@given(st.sampled_from(sorted(PARSERS)), TEXT)
def test_sampled_text_is_read_by_every_form(name, text):
    from envgrad.chat.call_forms import iter_found

    found = list(iter_found(PARSERS[name], text, [TOOL.schema]))
    assert len(found) <= len(text) + 1


@cache
def renderer(parser=None):
    return ChatRenderer(bpe_tokenizer(CHATML), tool_parser=parser)


@bounded("turns", 60)
@given(st.sampled_from([None, *sorted(PARSERS)]), TEXT, st.lists(st.integers(0, 399), max_size=20))
def test_sampled_tokens_are_read_as_a_turn(parser, text, ids):
    own = renderer(parser)
    written = own._encode(text.encode("utf-8", "replace").decode()) if text else []
    for row in (ids, written):
        read = own.read(row, [TOOL.schema])
        for call in read.calls:
            with contextlib.suppress(EnvgradError):
                check_arguments(TOOL, call.arguments)


@bounded("arguments")
@given(ANY)
def test_arguments_of_calls_are_checked(arguments):
    try:
        fits = check_arguments(TOOL, arguments)
    except EnvgradError:
        return
    assert isinstance(fits["n"], int)


MESSAGES = st.lists(
    ANY
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "nobody"]) | ANY, "content": TEXT | ANY},
        optional={"tool_calls": ANY | st.lists(ANY, max_size=2), "name": ANY, "tool_call_id": ANY},
    ),
    max_size=4,
)


@bounded("chats", 60)
@given(MESSAGES, MESSAGES | ANY)
def test_chats_are_checked_and_rendered(messages, result):
    try:
        opening = opening_messages(result, messages, "reset")
        ids = renderer().open(opening, [TOOL.schema])
    except EnvgradError:
        return
    assert ids and all(isinstance(one, int) for one in ids)


@bounded("rewards")
@given(ANY | st.dictionaries(st.text(max_size=4) | st.integers(), ANY, max_size=3))
def test_rewards_of_any_kind_are_numbers_or_failures(value):
    try:
        reward = read_reward(value, "get_reward")
    except EnvgradError:
        return
    numbers = reward.values() if isinstance(reward, dict) else [reward]
    assert all(one is None or abs(one) < float("inf") for one in numbers)


class Fed:
    def reset(self, word):
        return str(word)

    def get_reward(self):
        return 1.0


SPEC, _ = inspect_environment("fed", Fed)
ROWS = st.lists(
    ANY
    | st.dictionaries(
        st.sampled_from(["prompt", "word", "seed", "environment", "answer", "image"]), ANY | MESSAGES, max_size=4
    ),
    max_size=4,
)


@bounded("rows")
@given(ROWS, st.booleans(), st.booleans())
def test_rows_of_datasets_are_tasks_or_errors(rows, with_environment, streamed):
    try:
        dataset = iter(rows) if streamed else rows
        tasks = build_task_stream({"fed": SPEC} if with_environment else {}, seed=0, split="train", dataset=dataset)
        for task in tasks.take(3):
            row_messages((task.row or {}).get("prompt"), "row")
    except EnvgradError:
        return
    except KeyError as error:  # as the contract has it, for data without a prompt
        assert "prompt" in str(error) and not with_environment


OPTIONS = st.dictionaries(
    st.sampled_from(
        [
            "num_generations",
            "max_steps",
            "learning_rate",
            "temperature",
            "top_p",
            "top_k",
            "beta",
            "epsilon",
            "loss_type",
            "max_turns",
            "scale_rewards",
            "reward_weights",
            "environment_options",
            "on_nonfinite",
            "seed",
            "max_staleness",
            "asynchronous",
            "sampler",
            "optim",
            "lr_scheduler_type",
            "save_total_limit",
            "max_tokens_per_microbatch",
            "generation_batch_size",
            "per_device_train_batch_size",
            "deterministic",
            "chat_template_kwargs",
            "stop_strings",
        ]
    ),
    ANY,
    max_size=4,
)


@bounded("options", 60)
@given(st.sampled_from(["grpo", "rloo", "sdpo"]), OPTIONS)
def test_options_of_any_kind_are_checked(algorithm, options):
    with contextlib.suppress(EnvgradError):
        build_config({"output_dir": tempfile.gettempdir(), "use_cpu": True, "report_to": "none", **options}, algorithm)


YAML = st.lists(
    st.sampled_from(
        [
            "model: starter\n",
            "max_steps: ",
            "5\n",
            "environment: ",
            "a:B\n",
            "- x\n",
            "{",
            "}",
            "[",
            "&a ",
            "*a",
            "!!python/",
            "object/apply:os.system ['true']\n",
            "? ",
            "|\n",
            "---\n",
            "beta: .inf\n",
            "seed: 1e3\n",
            "\t",
            "'",
            '"',
            "#",
            ": ",
        ]
    )
    | st.text(max_size=6),
    max_size=14,
).map("".join)


@bounded("yaml", 60)
@given(YAML)
def test_configuration_files_are_data_or_errors(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with contextlib.suppress(ConfigurationError):
            read_request(model="starter", environments=(), config_file=path, arguments=())


TORN = st.tuples(st.floats(0, 1), st.binary(max_size=12), st.booleans())
"""where, what is written there, whether the rest is cut off"""


def torn(data, change):
    where, with_, cut = change
    at = int(where * len(data))
    return data[:at] + with_ + (b"" if cut else data[at + len(with_) :])


WEIGHTS = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.int64)}, {"format": "pt"})


@bounded("weights", 100)
@given(st.lists(TORN, min_size=1, max_size=3), st.binary(max_size=60), st.booleans())
def test_weight_files_are_read_or_refused(changes, noise, only_noise):
    data = noise if only_noise else WEIGHTS
    for change in changes:
        data = torn(data, change)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        path.write_bytes(data)
        with contextlib.suppress(ConfigurationError):
            read_tensors(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The files of a real one, within a round and with groups that wait."""
    from helpers.training_checkpoints import state_with_everything, stream_of_rows

    folder = tmp_path_factory.mktemp("whole")
    write_state(state_with_everything(), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}, stream_of_rows


@bounded("checkpoints", 100)
@given(st.data())
def test_checkpoints_are_read_or_refused(checkpoint, data):
    files, stream = checkpoint
    name = data.draw(st.sampled_from([STATE_NAME, f"{GROUPS}.json", f"{STEPS}.json", f"{STEPS}.safetensors"]))
    content = files[name]
    if name.endswith("json") and data.draw(st.booleans()):
        content = json.dumps(changed(json.loads(content), data)).encode()
    else:
        content = torn(content, data.draw(TORN))
    with tempfile.TemporaryDirectory() as folder:
        for other, own in files.items():
            (Path(folder) / other).write_bytes(content if other == name else own)
        tasks = stream()
        with contextlib.suppress(EnvgradError):
            state = read_state(Path(folder), tasks)
            tasks.load_state_dict(state.rounds.drawn_again())


def changed(value, data):
    """``value`` with something put in the place of one of its parts."""
    while isinstance(value, dict | list) and value and data.draw(st.integers(0, 4)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys))
        value[key] = changed(value[key], data)
        return value
    return data.draw(JSON)


def test_the_kinds_make_up_the_whole():
    assert sum(SHARE.values()) == pytest.approx(1.0) and Kind("GRPO").name == "GRPO"
