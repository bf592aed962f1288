"""Frames however they are torn, weights however they are damaged, and models as plain data."""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
from array import array
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sampling_kit import NAMES, build, plain_logprobs
from transformers import PreTrainedTokenizerFast

from envgrad.errors import ConfigurationError, WeightTransferError
from envgrad.sampling.process_frames import Frame, FrameError, FrameReader, receive_frames, send_frame
from envgrad.sampling.process_model import (
    build_model,
    build_tokenizer,
    describe_model,
    describe_tokenizer,
    sendable_tokenizer,
)
from envgrad.sampling.process_weights import read_weights, write_weights
from helpers.tokenizers import CHATML, bpe_tokenizer

INTEGERS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda ids: array("i", ids))
FLOATS = st.lists(st.floats(allow_nan=False), max_size=20).map(lambda numbers: array("d", numbers))
DATA = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(), st.none(), st.floats(allow_nan=False)))
FRAMES = st.lists(
    st.builds(
        lambda kind, data, columns: Frame(kind=kind, data=data, columns=tuple(columns)),
        st.text(max_size=5), DATA, st.lists(st.one_of(INTEGERS, FLOATS), max_size=3),
    ),
    max_size=5,
)  # fmt: skip


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_whole_and_in_order_however_they_are_cut(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    reader, got, at = FrameReader(), [], 0
    while at < len(stream):
        size = cuts[len(got) % len(cuts)]
        got += reader.feed(stream[at : at + size])
        at += size
    assert got == frames


@given(st.binary(min_size=8, max_size=64))
def test_what_is_no_frame_is_named_or_waits_for_more(data: bytes) -> None:
    try:
        frames = FrameReader().feed(data)
    except FrameError:
        return
    assert frames == []


@pytest.mark.parametrize("header", [{}, [], {"kind": "a", "data": {}, "columns": [["i", 2]], "file": False}])
def test_a_header_that_does_not_fit_is_named(header: object) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(FrameError):
        FrameReader().feed(len(text).to_bytes(4, "little") + (0).to_bytes(4, "little") + text)


def test_files_travel_with_their_frames() -> None:
    ours, theirs = socket.socketpair()
    reader = FrameReader()
    with ours, theirs:
        for number in (1, 2):
            with write_weights({"a": torch.full((3,), float(number))}, number) as file:
                send_frame(ours, Frame(kind="weights", data=file.facts(), file=file.file))
        frames: list[Frame] = []
        while len(frames) < 2:
            frames += receive_frames(theirs, reader) or []
        for number, frame in enumerate(frames, start=1):
            assert frame.file is not None
            assert read_weights(frame.file, frame.data)["a"].tolist() == [number] * 3
            os.close(frame.file)
        ours.close()
        assert receive_frames(theirs, reader) is None


# -- weights


def test_weights_are_a_safetensors_file_of_any_type_and_shape() -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 4),
        "view": torch.randn(4, 6).t(), "ids": torch.arange(5), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    with write_weights(tensors, version=11) as file:
        assert os.readlink(f"/proc/self/fd/{file.file}").endswith("(deleted)"), "it has no name that could stay"
        plain = load_file(f"/dev/fd/{file.file}")
        read = read_weights(file.file, file.facts())
    for name, tensor in tensors.items():
        assert torch.equal(plain[name], tensor) and torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype


def test_tied_weights_are_written_once_and_made_ones_are_not_taken_for_tied() -> None:
    head = torch.randn(100, 8)
    with write_weights({"embed": head, "head": head.view(100, 8)}, 1) as tied:
        assert torch.equal(read_weights(tied.file, tied.facts())["head"], head)
        assert tied.size < 2 * head.numel() * 4

    class Made(dict[str, Callable[[], torch.Tensor]]):
        """Each is made when it is read, and freed at once, so that the next may lie at its place."""

        def __getitem__(self, name: str) -> torch.Tensor:  # type: ignore[override]
            return super().__getitem__(name)()

        def items(self) -> object:  # type: ignore[override]
            return ((name, self[name]) for name in self)

    made = Made({f"w{n}": (lambda n=n: torch.full((64, 64), float(n))) for n in range(8)})
    with write_weights(made, 1) as file:  # type: ignore[arg-type]
        read = read_weights(file.file, file.facts())
    assert [read[f"w{n}"][0, 0].item() for n in range(8)] == list(range(8))


def test_damaged_weights_are_named_with_what_is_kept() -> None:
    with write_weights({"a": torch.ones(64)}, 2) as file:
        facts = file.facts()
        os.pwrite(file.file, b"\x00", facts["size"] - 1)
        with pytest.raises(WeightTransferError, match=r"version 2 .* corrupt: its checksum is .* old version is kept"):
            read_weights(file.file, facts)
        os.ftruncate(file.file, 100)
        with pytest.raises(WeightTransferError, match=rf"torn: 100 of {facts['size']} bytes"):
            read_weights(file.file, facts)
    with (
        write_weights({"a": torch.ones(64)}, 2) as file,
        pytest.raises(WeightTransferError, match="say version 2, not 3"),
    ):
        read_weights(file.file, file.facts() | {"version": 3})


def test_no_room_is_named_and_nothing_stays_open() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(WeightTransferError, match=r"version 5 of the policy, 0\.4 MB, .*File too large"):
            write_weights({"a": torch.ones(100_000)}, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= before


# -- models


@pytest.mark.parametrize("name", NAMES)
def test_a_described_model_is_the_same_model(name: str) -> None:
    model = build(name)
    twin = build_model(json.loads(json.dumps(describe_model(model))), model.state_dict())
    row = list(range(1, 30))
    assert type(twin) is type(model) and not twin.training
    assert plain_logprobs(twin, row, 1) == plain_logprobs(model, row, 1)
    assert all(
        one.data_ptr() != other.data_ptr() for one, other in zip(twin.parameters(), model.parameters(), strict=True)
    )


def test_types_and_ties_of_weights_are_kept() -> None:
    model = build("gemma3").bfloat16()
    model.model.norm.float()
    twin = build_model(describe_model(model), model.state_dict())
    assert twin.model.norm.weight.dtype == torch.float32 and twin.lm_head.weight.dtype == torch.bfloat16
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == model.config.tie_word_embeddings


def test_other_weights_than_the_models_are_refused() -> None:
    model = build("llama")
    description, weights = describe_model(model), model.state_dict()
    with pytest.raises(ConfigurationError, match="'more'"):
        build_model(description, weights | {"more": torch.zeros(1)})
    with pytest.raises(ConfigurationError, match=r"'lm_head.weight' has shape \(61, 32\)"):
        build_model(description, weights | {"lm_head.weight": torch.zeros(3, 3)})
    with pytest.raises(ConfigurationError, match="is no PreTrainedModel"):
        build_model(description | {"model": ["torch.nn", "Linear"]}, weights)
    model.is_quantized = True
    with pytest.raises(ConfigurationError, match="quantized"):
        describe_model(model)


def test_a_described_tokenizer_decodes_the_same() -> None:
    tokenizer = bpe_tokenizer(CHATML)
    twin = build_tokenizer(json.loads(json.dumps(describe_tokenizer(tokenizer))))
    assert isinstance(twin, PreTrainedTokenizerFast)
    ids = list(range(len(tokenizer)))
    assert twin.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    assert build_tokenizer(describe_tokenizer(None)) is None
    other = SimpleNamespace()
    assert sendable_tokenizer(other) is None  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="SimpleNamespace cannot go to the sampler's process"):
        describe_tokenizer(other)  # type: ignore[arg-type]
