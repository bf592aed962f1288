from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from envgrad.attention import use_envgrad_attention
from envgrad.errors import ConfigurationError
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.packing import Batch, PackMode, StepTotals, pack, padding_micro_batch
from envgrad.types import TrainingSample

VOCABULARY = 60
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "qwen3": Qwen3Config(**COMMON),
    "gemma3": Gemma3TextConfig(**COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0),
}  # fmt: skip


def tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    for parameter in model.parameters():  # random biases and norms too, and logits that are far from uniform
        parameter.data += 0.2 * torch.randn_like(parameter)
    use_envgrad_attention(model)
    install_policy_forward(model)
    return model.train()


def sample(group: str, prompt: int, own: int, *, gaps: tuple[int, ...] = (), seed: int = 0) -> TrainingSample:
    """A row whose prompt depends on ``group`` and whose own tokens depend on ``seed``; ``gaps`` are untrained."""
    prompts = torch.Generator().manual_seed(sum(group.encode()))
    ids = torch.randint(0, VOCABULARY, (prompt,), generator=prompts).tolist()
    owns = torch.Generator().manual_seed(1000 + seed)
    ids += torch.randint(0, VOCABULARY, (own,), generator=owns).tolist()
    mask = (0,) * prompt + tuple(0 if i in gaps else 1 for i in range(own))
    size = prompt + own
    advantages = torch.randn(size, generator=owns).tolist()
    return TrainingSample(
        token_ids=tuple(ids), mask=mask, logprobs=tuple(-float(i) for i in range(size)), versions=(0,) * size,
        advantages=tuple(a if m else 0.0 for a, m in zip(advantages, mask, strict=True)), prompt_length=prompt,
        group=group,
    )  # fmt: skip


def step() -> list[TrainingSample]:
    return [
        sample("a", 20, 12, seed=1),
        sample("b", 3, 9, seed=2, gaps=(0, 4, 5)),
        sample("a", 20, 5, seed=3, gaps=(4,)),
        sample("a", 20, 1, seed=4),
        sample("c", 6, 14, seed=5),
        sample("b", 3, 9, seed=6),
    ]


def plain_loss(model: PreTrainedModel, samples: list[TrainingSample], weights: list[float]) -> torch.Tensor:
    """sum_n w_n * A_n * logp_n with one plain forward per row, nothing of ours."""
    model.set_attn_implementation("sdpa")
    total = torch.zeros(())
    for row, weight in zip(samples, weights, strict=True):
        ids = torch.tensor([row.token_ids])
        logs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for t in range(1, len(row.token_ids)):
            if row.mask[t]:
                total = total + weight * row.advantages[t] * logs[t - 1, row.token_ids[t]]
    use_envgrad_attention(model)
    return total


def packed_loss(model: PreTrainedModel, batch: Batch) -> float:
    total = 0.0
    for micro_batch in batch.micro_batches:
        logprobs = policy_logprobs(model, micro_batch).logprobs
        loss = (micro_batch.weights * micro_batch.advantages * logprobs).sum()
        loss.backward()
        total += loss.item()
    return total


def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def assert_close(ours: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    scale = max(grad.abs().max().item() for grad in expected)
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("mode", ["shared", "packed", "single"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_packed_gradients_equal_plain_ones(name: str, mode: PackMode) -> None:
    model = tiny(name)
    samples, weights = step(), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    loss = plain_loss(model, samples, weights)
    loss.backward()
    expected = gradients(model)
    for max_tokens in (None, 40, 1):
        total = packed_loss(model, pack(samples, weights, max_tokens=max_tokens, mode=mode))
        assert total == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert_close(gradients(model), expected, 1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_activation_checkpointing_gives_the_same_gradients() -> None:
    model = tiny("gemma3")
    batch = pack(step(), [0.1] * 6)
    packed_loss(model, batch)
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed_loss(model, batch)
    assert_close(gradients(model), expected, 1e-6)


def test_a_layout_first_used_in_inference_mode_can_be_trained_with() -> None:
    model = tiny("llama")
    batch = pack(step(), [0.1] * 6)
    with torch.inference_mode():
        policy_logprobs(model, batch.micro_batches[0])
    packed_loss(model, batch)
    assert gradients(model)


def test_dropout_reaches_the_packed_attention() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    micro_batch = pack(step(), [0.1] * 6).micro_batches[0]
    first, second = policy_logprobs(model, micro_batch).logprobs, policy_logprobs(model, micro_batch).logprobs
    assert not torch.allclose(first, second)
    model.eval()
    first, second = policy_logprobs(model, micro_batch).logprobs, policy_logprobs(model, micro_batch).logprobs
    assert torch.equal(first, second)


shapes = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.lists(st.tuples(st.integers(0, 15), st.sets(st.integers(0, 14))), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


def drawn(groups: list[tuple[int, list[tuple[int, set[int]]]]]) -> list[TrainingSample]:
    seeds = itertools.count()
    rows = [
        sample(f"g{number}", prompt, own, gaps=tuple(gaps), seed=next(seeds))
        for number, (prompt, siblings) in enumerate(groups)
        for own, gaps in siblings
    ]
    return rows[::2] + rows[1::2]  # siblings need not be neighbours


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(1, 80) | st.none(), st.sampled_from(["shared", "packed", "single"]))
def test_any_packing_gives_the_plain_logprobs(groups: list, max_tokens: int | None, mode: PackMode) -> None:  # type: ignore[type-arg]
    samples = drawn(groups)
    batch = pack(samples, [1.0] * len(samples), max_tokens=max_tokens, mode=mode)
    seen: dict[int, list[tuple[float, int, float, float]]] = {}
    with torch.no_grad():
        for micro_batch in batch.micro_batches:
            logprobs = policy_logprobs(MODEL, micro_batch).logprobs
            rows = zip(
                micro_batch.sample_index.tolist(), logprobs.tolist(), micro_batch.target_ids.tolist(),
                micro_batch.sampler_logprobs.tolist(), micro_batch.advantages.tolist(), strict=True,
            )  # fmt: skip
            for number, *values in rows:
                seen.setdefault(micro_batch.samples[number], []).append(tuple(values))
        for index, row in enumerate(samples):
            trained = [t for t in range(len(row.mask)) if row.mask[t]]
            assert len(seen.get(index, [])) == len(trained)  # each exactly once
            if trained:
                logs = MODEL(input_ids=torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
                for t, (logprob, target, sampler, advantage) in zip(trained, seen[index], strict=True):
                    assert target == row.token_ids[t] and sampler == row.logprobs[t]
                    assert advantage == pytest.approx(row.advantages[t], rel=1e-6)
                    assert logprob == pytest.approx(logs[t - 1, target].item(), abs=2e-5)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 80))
def test_budget_and_token_counts(groups: list, max_tokens: int) -> None:  # type: ignore[type-arg]
    samples = drawn(groups)
    weights = [1.0] * len(samples)
    whole = pack(samples, weights)
    # Distinct prefixes of length 1, 2, ... over all rows, with the group as the root, are what must be forwarded, if no
    # two siblings happen to start alike: sampled starts are not shared.
    needed: dict[str, set[tuple[int, ...]]] = {}
    own = 0
    for row in samples:
        if any(row.mask):
            last = max(t for t in range(len(row.mask)) if row.mask[t])
            needed.setdefault(row.group, set()).update(row.token_ids[:n] for n in range(1, row.prompt_length + 1))
            own += last - row.prompt_length
    required = own + sum(len(prefixes) for prefixes in needed.values())
    assert whole.num_forwarded_tokens == whole.num_required_tokens == required
    assert whole.num_tokens == sum(sum(row.mask) for row in samples)
    split = pack(samples, weights, max_tokens=max_tokens)
    assert split.num_required_tokens == required
    for micro_batch in split.micro_batches:
        assert micro_batch.num_forwarded_tokens <= max_tokens or len(micro_batch.samples) == 1
    assert sorted(i for micro_batch in split.micro_batches for i in micro_batch.samples) == [
        index for index, row in enumerate(samples) if any(row.mask)
    ]
    if max_tokens >= max((sum(len(s) for s in needed.values()) + own, 0)):
        assert len(split) <= 1


def test_groups_are_gathered_up_to_the_preferred_size_and_never_cut_for_it() -> None:
    samples, weights = step(), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]  # groups of 34, 19 and 19 forwarded tokens
    whole = pack(samples, weights)
    for limit, sizes in ((1, [34, 19, 19]), (30, [34, 19, 19]), (38, [34, 38]), (54, [53, 19]), (99, [72])):
        batch = pack(samples, weights, preferred_tokens=limit)
        assert [one.num_forwarded_tokens for one in batch.micro_batches] == sizes
        assert batch.num_forwarded_tokens == whole.num_forwarded_tokens
    both = pack(samples, weights, max_tokens=30, preferred_tokens=60)
    assert [one.num_forwarded_tokens for one in both.micro_batches] == [31, 19, 23, 19]  # one sample has 31 by itself
    with pytest.raises(ConfigurationError, match="preferred_tokens=0 must be at least 1"):
        pack(samples, weights, preferred_tokens=0)
    model = tiny("llama")
    packed_loss(model, whole)
    expected = gradients(model)
    packed_loss(model, pack(samples, weights, preferred_tokens=1))
    assert_close(gradients(model), expected, 1e-5)


MODEL = tiny("gemma3").eval()


def test_the_row_of_the_module_docstring() -> None:
    common = {"logprobs": (0.0,) * 6, "versions": (0,) * 6, "prompt_length": 2, "group": "g"}
    first = TrainingSample(
        token_ids=(1, 2, 10, 11, 12, 13), mask=(0, 0, 1, 1, 0, 1), advantages=(0, 0, 1, 2, 0, 3), **common
    )
    common |= {"logprobs": (0.0,) * 4, "versions": (0,) * 4}
    second = TrainingSample(token_ids=(1, 2, 20, 21), mask=(0, 0, 1, 1), advantages=(0, 0, 4, 5), **common)
    micro_batch = pack([first, second], [0.5, 0.25]).micro_batches[0]
    assert micro_batch.input_ids.tolist() == [[1, 2, 10, 11, 12, 20]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2]]
    assert micro_batch.predict_index.tolist() == [1, 2, 4, 1, 5]
    assert micro_batch.target_ids.tolist() == [10, 11, 13, 20, 21]
    assert micro_batch.advantages.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.weights.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert micro_batch.sample_index.tolist() == [0, 0, 0, 1, 1]


def test_groups_stay_together_and_large_ones_are_cut_between_siblings() -> None:
    samples = [sample("a", 10, 6, seed=i) for i in range(4)] + [sample("b", 10, 6, seed=9 + i) for i in range(2)]
    batch = pack(samples, [1.0] * 6, max_tokens=20)  # a: 10 + 4 * 5 = 30, b: 10 + 2 * 5 = 20
    assert [micro_batch.samples for micro_batch in batch.micro_batches] == [(0, 1), (2, 3), (4, 5)]
    assert batch.num_forwarded_tokens == 60 and batch.num_required_tokens == 50
    assert [m.samples for m in pack(samples, [1.0] * 6, max_tokens=50).micro_batches] == [(0, 1, 2, 3, 4, 5)]


def test_equal_group_names_with_different_prompts_share_nothing() -> None:
    samples = [sample("ab", 4, 3, seed=1), sample("ba", 4, 3, seed=2)]
    renamed = [samples[0], TrainingSample(**{**fields(samples[1]), "group": "ab", "token_ids": (9,) * 7})]
    assert pack(renamed, [1.0, 1.0]).num_forwarded_tokens == 12


def fields(row: TrainingSample) -> dict[str, object]:
    return {name: getattr(row, name) for name in TrainingSample.__slots__}


def test_samples_without_weight_or_advantage_are_left_out() -> None:
    samples = step()
    quiet = TrainingSample(**{**fields(samples[0]), "advantages": (0.0,) * 32})
    batch = pack([quiet, *samples[1:]], [0.1, 0.0, 0.1, 0.1, 0.1, 0.1])
    assert batch.micro_batches[0].samples == (0, 2, 3, 4, 5)
    batch = pack([quiet, *samples[1:]], [0.1, 0.0, 0.1, 0.1, 0.1, 0.1], skip_zero_advantages=True)
    assert batch.micro_batches[0].samples == (2, 3, 4, 5)
    nothing = pack([quiet], [0.0])
    assert len(nothing) == 0 and nothing.num_tokens == 0 and nothing.num_required_tokens == 0


def test_padding_micro_batches_change_nothing() -> None:
    model = tiny("llama")
    batch = pack(step(), [0.1] * 6, max_tokens=40)
    packed_loss(model, batch)
    expected = gradients(model)
    padded = batch.padded_to(len(batch) + 2)
    assert len(padded) == len(batch) + 2 and padded.num_tokens == batch.num_tokens
    packed_loss(model, padded)
    assert_close(gradients(model), expected, 1e-7)
    packed_loss(model, Batch(micro_batches=(padding_micro_batch(),), samples=(), totals=batch.totals,
                             num_required_tokens=0))  # fmt: skip
    assert all((grad == 0).all() for grad in gradients(model))


def test_moving_keeps_everything() -> None:
    micro_batch = pack(step(), [0.1] * 6).micro_batches[0]
    moved = micro_batch.to("meta")
    tensors = [name for name in type(micro_batch).__slots__ if isinstance(getattr(micro_batch, name), torch.Tensor)]
    assert len(tensors) == 9
    assert all(getattr(moved, name).device.type == "meta" for name in tensors)
    assert moved.layout is not None and moved.layout.num_tokens == micro_batch.num_forwarded_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"mode": "both"}, "mode='both' must be one of"),
        ({"weights": [1.0]}, "1 weights for 6 samples"),
        ({"weights": [1.0] * 5 + [float("nan")]}, "weight of sample 5 is nan"),
        ({"weights": [1.0] * 5 + [-1.0]}, "weight of sample 5 is -1"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"weights": [1.0] * 6, **options}
    with pytest.raises(ConfigurationError, match=message):
        pack(step(), **arguments)  # type: ignore[arg-type]


def test_totals_are_carried_to_micro_batches() -> None:
    totals = StepTotals(num_samples=100, num_tokens=1234)
    batch = pack(step(), [0.1] * 6, totals=totals)
    assert batch.totals == totals and batch.micro_batches[0].total_tokens == 1234
    assert pack(step(), [0.1] * 6).totals == StepTotals(num_samples=6, num_tokens=46)


# Teachers


def taught(row: TrainingSample, prompt: tuple[int, ...]) -> TrainingSample:
    return replace(row, teacher_prompt=prompt)


SHORT, LONG = tuple(range(30, 35)), tuple(range(10, 40))


def taught_step() -> list[TrainingSample]:
    first, second, third, fourth, fifth, sixth = step()
    return [taught(first, LONG), second, taught(third, LONG), taught(fourth, SHORT), fifth, taught(sixth, SHORT)]


@pytest.mark.parametrize("mode", ["shared", "packed", "single"])
@pytest.mark.parametrize("max_tokens", [None, 70, 1])
def test_the_teachers_tokens_are_the_students_in_the_same_order(mode: PackMode, max_tokens: int | None) -> None:
    model = tiny("llama").eval()
    batch = pack(taught_step(), [1.0] * 6, mode=mode, max_tokens=max_tokens)
    seen = 0
    for packed in batch.micro_batches:
        if packed.teacher is None:
            assert all(batch.samples[number].teacher_prompt is None for number in packed.samples)
            continue
        rows, index = packed.teacher.rows, packed.teacher.index
        assert rows.teacher is None and index.tolist() == sorted(index.tolist())
        assert rows.target_ids.tolist() == packed.target_ids[index].tolist()
        assert rows.sampler_logprobs.tolist() == packed.sampler_logprobs[index].tolist()
        with torch.no_grad():
            found = policy_logprobs(model, rows).logprobs
        expected = []
        for number in packed.samples:
            row = batch.samples[number]
            if row.teacher_prompt is not None:
                seen += 1
                whole = row.teacher_prompt + row.token_ids[row.prompt_length :]
                logs = model(input_ids=torch.tensor([whole]), use_cache=False).logits[0].log_softmax(-1)
                shift = len(row.teacher_prompt) - row.prompt_length
                expected += [
                    logs[at + shift - 1, token]
                    for at, (token, trained) in enumerate(zip(row.token_ids, row.mask, strict=True))
                    if trained
                ]
        assert torch.allclose(found, torch.stack(expected), atol=1e-4)
    assert seen == 4


def test_siblings_with_one_demonstration_share_the_teachers_prompt() -> None:
    (packed,) = pack(taught_step(), [1.0] * 6).micro_batches
    assert packed.teacher is not None
    # a: 30 once for 11 + 3 own tokens, 5 + 0; b: 5 + 8
    assert packed.num_teacher_tokens == 30 + 11 + 3 + 5 + 0 + 5 + 8


@pytest.mark.parametrize("max_tokens", [60, 75, 100, 150])
def test_the_token_budget_counts_the_teacher(max_tokens: int) -> None:
    batch = pack(taught_step(), [1.0] * 6, max_tokens=max_tokens)
    for packed in batch.micro_batches:
        assert packed.num_forwarded_tokens + packed.num_teacher_tokens <= max_tokens or len(packed.samples) == 1
    everything = pack(taught_step(), [1.0] * 6)
    assert everything.num_required_tokens == everything.num_forwarded_tokens + everything.num_teacher_tokens
    assert sorted(number for packed in batch.micro_batches for number in packed.samples) == list(range(6))


def test_a_taught_sample_is_forwarded_without_an_advantage() -> None:
    flat = [replace(row, advantages=(0.0,) * len(row.advantages)) for row in taught_step()]
    (packed,) = pack(flat, [1.0] * 6, skip_zero_advantages=True).micro_batches
    assert packed.samples == (0, 2, 3, 5)
    assert packed.total_samples == 6
    moved = packed.to("cpu")
    assert moved.teacher is not None and moved.at_temperature(0.5).teacher.rows.temperature == 0.5
