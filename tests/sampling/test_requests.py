from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sampling_kit import session
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from envgrad.sampling.requests import Request, StopStrings, common_prefix
from envgrad.sampling.sampler import SamplingParams


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30), st.integers(0, 30))
def test_common_prefix_is_that_of_a_plain_loop(left: list[int], right: list[int], limit: int) -> None:
    limit = min(limit, len(left), len(right))
    want = next((at for at in range(limit) if left[at] != right[at]), limit)
    assert common_prefix(left, right, limit) == want


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@given(st.text(max_size=12), st.text(min_size=1, max_size=5).filter(lambda one: "\ufffd" not in one))
def test_stop_strings_are_found_at_the_token_that_completes_them(head: str, needle: str) -> None:
    tokenizer = byte_tokenizer()
    stops = StopStrings(tokenizer)
    answer = tokenizer(head + needle + "tail")["input_ids"]
    text = ""
    for size in range(1, len(answer) + 1):
        text = tokenizer.decode(answer[:size])
        if needle in text:
            assert stops.reached(answer[:size], ("\x00never", needle))
            break
        assert not stops.reached(answer[:size], ("\x00never", needle))
    assert needle in text


def test_the_context_limits_an_answer() -> None:
    request = Request.of([1, 2, 3], SamplingParams(max_tokens=10), session(0), max_context=5)
    assert not request.take(7, -0.5, None)
    assert request.take(8, -0.25, None)
    answer = request.completion
    assert (answer.token_ids, answer.logprobs, answer.stop_reason) == ((7, 8), (-0.5, -0.25), "length")
