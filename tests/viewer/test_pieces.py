from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from envgrad.viewer.pieces import TokenDecoder, find_tokenizer, token_texts


def by_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=40))
def test_pieces_joined_are_the_text_whatever_the_tokens_cut(text: str) -> None:
    ids = list(text.encode("utf-8", errors="replace"))
    texts = token_texts(ids, by_bytes)
    assert len(texts) == len(ids)
    assert "".join(texts) == by_bytes(ids)


def test_a_character_of_several_tokens_is_the_text_of_the_last_of_them() -> None:
    assert token_texts(list("a😀b".encode()), by_bytes) == ["a", "", "", "", "😀", "b"]


def test_bytes_that_are_no_character_do_not_hold_back_what_follows() -> None:
    texts = token_texts([0xFF, 0x61, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x62], by_bytes)
    assert len(texts) == 8
    assert texts[-1].endswith("b") and texts[1].endswith("a")


def test_a_decoder_that_drops_the_first_space_keeps_those_within() -> None:
    words = {1: " one", 2: " two"}

    def decode(ids):
        return "".join(words[one] for one in ids).removeprefix(" ")

    assert token_texts([1, 2, 2], decode) == ["one", " two", " two"]


def test_the_tokenizer_beside_the_episodes_comes_first_and_then_the_newest_checkpoint(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    assert find_tokenizer(tmp_path) == tmp_path / "checkpoint-10" / "tokenizer.json"
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "tokenizer.json").write_text("{}")
    assert find_tokenizer(tmp_path) == tmp_path / "episodes" / "tokenizer.json"


def test_a_broken_tokenizer_leaves_ids_and_one_that_appears_later_is_found(tmp_path: Path) -> None:
    decoder = TokenDecoder(tmp_path)
    assert decoder.texts([1]) is None
    path = tmp_path / "tokenizer.json"
    path.write_text("{ not yet")
    assert decoder.texts([1]) is None
    path.write_text(json.dumps(tiny_tokenizer()))
    assert decoder.texts([0, 1, 1]) == ["<end>", "hello", "hello"]


def tiny_tokenizer() -> dict:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 0, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {"<end>": 0, "hello": 1}, "unk_token": "<end>"},
    }  # fmt: skip
