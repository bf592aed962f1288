"""Faults known from other libraries, on whole episodes: from what is sampled to what is trained."""

from __future__ import annotations

import math

import pytest
import torch

from envgrad.algorithms.grpo import GRPO, training_sample
from envgrad.chat.renderer import ChatRenderer
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.losses import LossInputs
from envgrad.packing import pack
from envgrad.types import Group, TrainingSample
from helpers.chat_templates import CASES, TOOLS
from helpers.models import tiny_llama
from helpers.tokenizers import CHATML, bpe_tokenizer
from helpers.world import RENDERER, Counter, play_one, turn


def test_history_that_the_template_rewrites_is_still_trained_as_it_was_sampled():
    """The template drops <think> from earlier turns; the row keeps them, in the context they were sampled in."""
    renderer = CASES["drops_earlier_thinking"].renderer()
    tokenizer = renderer.tokenizer
    opening = [{"role": "user", "content": "Count."}]
    row, sampled = renderer.open(opening, TOOLS), []
    for number in range(2):
        text = (
            f"<think>\nturn {number}\n</think>\n\n<tool_call>\n"
            + '{"name": "inc", "arguments": {"n": 1}}\n</tool_call>'
        )
        ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        read = renderer.read(ids, TOOLS, turn=number)
        assert f"turn {number}" in read.message["reasoning_content"] and len(read.calls) == 1
        before = list(row)
        row += ids
        sampled.append((len(before), ids))
        result = {"role": "tool", "name": "inc", "tool_call_id": read.calls[0].id, "content": "now 1"}
        row += renderer.suffix(ids, [result], TOOLS)
        assert row[: len(before)] == before, "the row only grows"
    for start, ids in sampled:
        assert row[start : start + len(ids)] == ids
    assert tokenizer.decode(row).count("<think>") >= 2


def test_a_sampled_end_of_turn_keeps_its_own_log_prob_and_is_trained_once():
    """ln(0.01) on the terminator: the ratio of an unchanged policy is 1, not 0.01 or 100."""
    answer = turn("ok")
    logprobs = [-0.5] * (len(answer) - 1) + [math.log(0.01)]
    episode = play_one(Counter, [(answer, logprobs)])
    end = RENDERER.tokenizer.convert_tokens_to_ids("<|im_end|>")
    trained = [(t, lp) for t, lp, m in zip(episode.token_ids, episode.logprobs, episode.mask, strict=True) if m]
    assert [pair for pair in trained if pair[0] == end] == [(end, math.log(0.01))]
    sample = training_sample(episode, 1.0)
    packed = pack([sample], [1.0]).micro_batches[0]
    assert packed.target_ids.tolist() == answer
    inputs = LossInputs.of(packed, _outputs(packed.sampler_logprobs))
    outputs = GRPO().loss(inputs)
    assert float(outputs.metrics["ratio/max"].value) == pytest.approx(1.0)


def _outputs(logprobs):
    from envgrad.logprobs import PolicyOutputs

    return PolicyOutputs(logprobs=logprobs.clone().requires_grad_(), entropy=None)


def test_an_end_of_turn_that_is_also_the_padding_is_trained():
    """pad == eos: masks come from the sampler, never from token values."""
    tokenizer = bpe_tokenizer(CHATML, pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    end = tokenizer.eos_token_id
    model = tiny_llama()
    install_policy_forward(model)
    samples = [
        TrainingSample(
            token_ids=(5, 6, *own), mask=(0, 0, *(1 for _ in own)), logprobs=(0.0,) * (2 + len(own)),
            versions=(0,) * (2 + len(own)), advantages=(0.0, 0.0, *(1.0 for _ in own)), prompt_length=2, group="g",
        )
        for own in ((7, 8, end), (7, end))
    ]  # fmt: skip
    batch = pack(samples, [1.0, 1.0])
    packed = batch.micro_batches[0]
    counts = torch.bincount(packed.sample_index).tolist()
    assert counts == [3, 2] and batch.num_tokens == 5
    assert sorted(packed.target_ids.tolist()) == sorted([7, 8, end, 7, end])
    assert torch.isfinite(policy_logprobs(model, packed, entropy="none").logprobs).all()


def test_a_renderer_for_pad_equal_to_eos_stops_on_it_and_appends_nothing_twice():
    renderer = ChatRenderer(bpe_tokenizer(CHATML, pad="<|im_end|>"))
    end = renderer.tokenizer.eos_token_id
    ids = [*renderer.tokenizer.encode("x", add_special_tokens=False), end]
    assert end in renderer.stop_token_ids
    assert renderer.suffix(ids, [{"role": "user", "content": "go"}], None)[0] != end
    assert renderer.read(ids, None).text == "x"


def test_advantages_follow_the_task_not_the_order_of_generation():
    """Two tasks whose reward depends on the task only: every advantage is 0, also after a shuffle."""

    class ByTask(Counter):
        def reset(self, seed):
            self.n = seed % 97
            return "Count."

    from helpers.world import play

    groups = play(ByTask, [turn("x")], groups=2, siblings=4).groups
    assert groups[0].episodes[0].reward != groups[1].episodes[0].reward
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        shuffled = [
            Group(task=group.task, episodes=tuple(group.episodes[index] for index in order)) for group in groups
        ]
        samples = GRPO().credit(shuffled)
        assert len(samples) == 8 and all(not any(sample.advantages) for sample in samples)
