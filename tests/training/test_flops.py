from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.packing import pack
from envgrad.training.flops import ModelCost, RowWork, Work, matmul_rate
from envgrad.types import Episode, Group, StopReason, Task, TrainingSample
from helpers.models import tiny_llama, zoo


def sample(own, *, prompt=(1, 2, 3), mask=None, group="g", advantage=1.0):
    mask = (0,) * len(prompt) + tuple(mask or (1,) * len(own))
    length = len(prompt) + len(own)
    return TrainingSample(
        token_ids=(*prompt, *own), mask=mask, logprobs=(-1.0,) * length, versions=(0,) * length,
        advantages=tuple(advantage * one for one in mask), prompt_length=len(prompt), group=group,
    )  # fmt: skip


def test_rows_by_hand():
    rows = [RowWork("a", 3, 5, 2), RowWork("a", 3, 4, 1), RowWork("b", 2, 2, 1)]
    # tokens: prompts 3 + 2, own 2 + 1 + 0; pairs: prompts 6 + 3, own 4 + 5 and 4
    assert Work.of_rows(rows) == Work(tokens=8, predictions=4, pairs=22)


def test_rollouts_by_hand():
    """The last sampled token of a row and what follows it need no forward; an episode without an answer needs none."""
    task = Task(position=0, split="train", environment="e", group_id=1, seed=1)

    def episode(sibling, mask):
        length = len(mask)
        return Episode(
            task=task, sibling=sibling, token_ids=(7,) * length, mask=mask, logprobs=(0.0,) * length,
            versions=(0,) * length, prompt_length=2, messages=(), turns=(), stop_reason=StopReason.DONE, reward=0.0,
        )  # fmt: skip

    episodes = (episode(0, (0, 0, 1, 1, 0, 1)), episode(1, (0, 0, 1, 0, 0)), episode(2, (0, 0)))
    work = Work.of_groups([Group(task=task, episodes=episodes)])
    assert work == Work(tokens=2 + 3, predictions=4, pairs=3 + (3 + 4 + 5))


@pytest.mark.parametrize("mode", ["shared", "packed", "single"])
def test_what_a_batch_must_forward_does_not_depend_on_how_it_is_packed(mode):
    samples = [sample((4, 5, 6), mask=(1, 0, 1)), sample((7,)), sample((8, 9), group="h"), sample((3,), advantage=0.0)]
    batch = pack(samples, [1.0] * 4, mode=mode, max_tokens=6, skip_zero_advantages=True)
    work = Work.of_batch(batch)
    assert work == Work(tokens=(3 + 2 + 0) + (3 + 1), predictions=2 + 1 + 2, pairs=(6 + 4 + 5) + (6 + 4))
    assert batch.num_forwarded_tokens >= work.tokens


def test_a_micro_batch_as_it_is_forwarded():
    packed = pack([sample((4, 5, 6)), sample((7,))], [1.0, 1.0]).micro_batches[0]
    assert Work.of_packed(packed) == Work(tokens=5, predictions=4, pairs=6 + 4 + 5)


def test_sizes_of_a_model_by_hand():
    model = tiny_llama(vocab_size=50, tie_word_embeddings=False)
    # per layer: query and output 16 x 16, key and value 16 x 8, three of 16 x 32, two norms; one norm at the end
    body = 2 * (2 * 256 + 2 * 128 + 3 * 512 + 32) + 16
    cost = ModelCost.of(model)
    assert cost == ModelCost(
        body=body, trained_body=body, head=800, trained_head=800, attention=4 * 2 * 4 * 4
    )  # fmt: skip
    tied = ModelCost.of(tiny_llama(vocab_size=50, tie_word_embeddings=True))
    assert tied == cost, "a head that is the embedding computes the same"
    assert ModelCost.of(zoo("gpt2", 50)).attention == 4 * 2 * 32


def test_training_is_three_forwards_and_with_adapters_less():
    work = Work(tokens=10, predictions=3, pairs=55)
    cost = ModelCost.of(tiny_llama())
    assert cost.training(work) == 3 * cost.forward(work)
    adapted = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    lora = ModelCost.of(adapted.get_base_model())
    adapters = 2 * (2 * 16 + 16 * 2)
    assert (lora.body, lora.trained_body, lora.trained_head) == (cost.body + adapters, adapters, 0)
    assert lora.training(work) == (4 * lora.body + 2 * adapters) * 10 + 4 * lora.head * 3 + 3 * lora.attention * 55


def test_experts_are_not_guessed():
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    assert ModelCost.of(model) is None


def test_the_count_is_what_torch_counts():
    """Of products of weights; norms, which are in ``N``, are a few in a thousand here."""
    model = tiny_llama(hidden_size=64, intermediate_size=128)
    install_policy_forward(model).chooses_rows = False  # the count is of every layer for every token
    packed = pack([sample((4, 5, 6, 7, 8)), sample((7, 8))], [1.0, 1.0]).micro_batches[0]
    cost, work = ModelCost.of(model), Work.of_packed(packed)
    with FlopCounterMode(display=False) as counter:
        policy_logprobs(model, packed).logprobs.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(getattr(torch.ops.aten, name), 0) for name in ("mm", "addmm"))
    attention = 3 * cost.attention * work.pairs
    # The head's gradient with respect to hidden states is written in place, which torch does not count.
    unseen = 2 * cost.head * work.predictions
    assert products == pytest.approx(cost.training(work) - attention - unseen, rel=0.01)


def test_the_rate_is_measured_once_and_draws_nothing(monkeypatch):
    torch.manual_seed(5)
    device, before = torch.device("cpu"), torch.get_rng_state()
    first = matmul_rate(device, torch.float32)
    assert first > 0 and torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr("envgrad.training.flops._time", None)
    assert matmul_rate(device, torch.float32) == first
