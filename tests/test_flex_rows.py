"""FlexAttention over packed rows, in its eager form: numbers, and where it is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from transformers import LlamaConfig, MistralConfig, PretrainedConfig

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.attention import AttentionCall
from envgrad.config import rollout as config_module
from envgrad.errors import ConfigurationError
from envgrad.flex_rows import BLOCK, FlexRow, block_mask, compiled_attention, flex_fault, visible_spans
from envgrad.layout import FlexLayout, PackedLayout
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.training import setup
from helpers.models import Letters, config, flat, tiny_llama, tokenizer_of
from helpers.row_models import COMMON, assert_equal, learned, model_of, rows

Families = list[tuple[int, list[int]]]
families = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=3
).filter(lambda shape: sum(prefix + sum(lengths) for prefix, lengths in shape) > 0)
windows = st.none() | st.integers(1, 20)


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch has a backward of the eager form, which its public function refuses on a CPU."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *inputs: None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=100):
        yield
    torch._dynamo.reset()


def defined(shape: Families, window: int | None) -> Tensor:
    """Who sees whom, pair by pair."""
    tokens = []  # family, row (-1: the prefix), position
    for family, (prefix, lengths) in enumerate(shape):
        tokens += [(family, -1, position) for position in range(prefix)]
        for number, length in enumerate(lengths):
            tokens += [(family, number, prefix + position) for position in range(length)]
    return torch.tensor(
        [
            [
                k <= q and tokens[q][0] == tokens[k][0] and tokens[k][1] in (-1, tokens[q][1])
                and (window is None or tokens[q][2] - tokens[k][2] < window)
                for k in range(len(tokens))
            ]
            for q in range(len(tokens))
        ]
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(families, windows, st.sampled_from([2, 3, 128]))
def test_the_mask_says_what_the_definition_says(shape: Families, window: int | None, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("envgrad.flex_rows.BLOCK", block)
        mask = block_mask(visible_spans(shape, window))
    expected = defined(shape, window)
    size = len(expected)
    places = torch.arange(size)
    assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places[None]), expected)
    ours = torch_flex.create_block_mask(mask.mask_mod, None, None, size, size, device="cpu", BLOCK_SIZE=block)
    assert mask.shape == ours.shape and torch.equal(mask.to_dense(), ours.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(mask, f"{name}_num_blocks")
        assert torch.equal(counts, getattr(ours, f"{name}_num_blocks"))
        listed = torch.arange(counts.shape[-1]) < counts[..., None]
        found, wanted = (getattr(one, f"{name}_indices") for one in (mask, ours))
        assert torch.equal(found[listed], wanted[listed])


def attended(layout: PackedLayout, window: int | None, dtype: torch.dtype, heads: tuple[int, int]) -> list[Tensor]:
    """Output and gradients for random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    size = layout.num_tokens
    made = [torch.randn(1, size, count, 8, generator=generator) for count in (heads[0], heads[1], heads[1])]
    inputs = [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]
    output = layout.attend(AttentionCall(layer=0, scaling=0.5, dropout=0.0, window=window), *inputs)
    output.pow(2).sum().backward()
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("native", [True, False], ids=["native", "pieces"])
@settings(max_examples=10, deadline=None)
@given(families, windows, st.sampled_from([torch.float32, torch.float64]), st.sampled_from([(4, 2), (3, 3), (4, 1)]))
def test_numbers_and_gradients_are_those_of_other_ways(
    native: bool, shape: Families, window: int | None, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(recompile_limit=100):
        patch.setattr(torch_flex, "_validate_device", lambda *inputs: None)
        patch.setattr("envgrad.layout.BLOCK", 0)
        if not native:
            patch.setattr("envgrad.layout.can_attend", lambda *inputs: False)
        layout = PackedLayout.build(shape)
        found, expected = (attended(one, window, dtype, heads) for one in (layout.by("flex"), layout))
        blocks = attended(layout, layout._longest - 1 or 1, dtype, heads)  # SDPA: something is beyond its window
        beyond = attended(layout.by("flex"), layout._longest - 1 or 1, dtype, heads)
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    for a, b in zip((*found, *beyond), (*expected, *blocks), strict=True):
        assert (a - b).abs().max() <= limit * b.abs().max().clamp(min=1)


def test_a_layout_keeps_its_masks_and_leaves_the_rest_to_other_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout.build([(100, (90, 40))])
    flex = layout.by("flex")
    assert isinstance(flex, FlexLayout) and layout.by("flex") is flex is flex.by("flex") and layout.by("auto") is layout
    row = flex._row
    first = row.mask(None, torch.device("cpu"))
    assert row.mask(None, torch.device("cpu")) is first is row.mask(190, torch.device("cpu"))  # nothing is beyond it
    assert row.mask(189, torch.device("cpu")) is not first

    calls: list[int] = []
    monkeypatch.setattr(FlexRow, "attend", lambda self, query, *rest, **options: calls.append(query.shape[2]) or query)
    query = torch.randn(1, 2, 230, 8)
    call = AttentionCall(layer=0, scaling=None, dropout=0.0, window=None)
    flex.attend(call, query, query, query)
    flex.attend(AttentionCall(layer=0, scaling=None, dropout=0.1, window=None), query, query, query)
    short = PackedLayout.build([(0, (BLOCK,))]).by("flex")
    short.attend(call, *[query[:, :, :BLOCK]] * 3)
    assert calls == [230]


def test_rows_of_every_length_are_traced_once_with_their_gradients(backward: None) -> None:
    """What a GPU compiles, traced forward and backward for a backend that runs torch's operations."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = compiled_attention(backend)
    counts = []
    for shape, window in (([(60, [90, 40])], None), ([(0, [150]), (40, [9, 8])], 30), ([(200, [70, 60, 3])], None)):
        layout = PackedLayout.build(shape)
        inputs = [
            torch.randn(1, layout.num_tokens, heads, 8, dtype=torch.double).transpose(1, 2).requires_grad_()
            for heads in (6, 3, 3)
        ]
        mask = FlexRow(shape).mask(window, torch.device("cpu"))
        output = compiled(*inputs, block_mask=mask, scale=0.5, enable_gqa=True).transpose(1, 2)
        call = AttentionCall(layer=0, scaling=0.5, dropout=0.0, window=window)
        plain = layout.attend(call, *inputs)
        assert torch.allclose(output, plain, atol=1e-12)
        grads = [torch.autograd.grad(one.pow(2).sum(), inputs) for one in (output, plain)]
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*grads, strict=True))
        counts.append(len(graphs))
    assert counts[0] == counts[-1]


@pytest.mark.parametrize(
    "kind", [LlamaConfig(**COMMON), MistralConfig(**COMMON, sliding_window=7)], ids=["llama", "mistral"]
)
def test_a_policy_learns_the_same(kind: PretrainedConfig, backward: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envgrad.layout.BLOCK", 0)
    model, batch = model_of(kind), rows()
    forward = install_policy_forward(model)
    expected = learned(model, batch)
    forward.packed_attention = "flex"
    used: list[FlexRow] = []
    attend = FlexRow.attend
    monkeypatch.setattr(FlexRow, "attend", lambda self, *rest, **more: used.append(self) or attend(self, *rest, **more))
    assert_equal(learned(model, batch), expected)
    assert len(used) == 2 and used[0] is used[1]  # both layers, one set of masks
    with torch.no_grad():
        policy_logprobs(copy.deepcopy(model), batch)  # what references and teachers are
    assert len(used) == 4


def test_a_step_of_training_is_the_same(tmp_path, backward, monkeypatch) -> None:
    """With a reference, as on a GPU but for the device."""
    monkeypatch.setattr("envgrad.layout.BLOCK", 0)
    monkeypatch.setattr(config_module, "check_packing", lambda config: None)
    attend, passes = FlexRow.attend, set()

    def watched(self: FlexRow, *inputs: Tensor, **options: Any) -> Tensor:
        passes.add(torch.is_grad_enabled())
        return attend(self, *inputs, **options)

    monkeypatch.setattr(FlexRow, "attend", watched)
    weights = []
    for attention in ("auto", "flex"):
        trainer = GRPOTrainer(
            tiny_llama(), environment_factory=Letters, processing_class=tokenizer_of(),
            args=config(tmp_path / attention, max_steps=1, beta=0.1, packed_attention=attention, deterministic=True),
        )  # fmt: skip
        trainer.train()
        weights.append(flat(trainer.model))
    assert passes == {True, False}  # the policy's, the reference's
    moved = (weights[0] - flat(tiny_llama())).abs().max()
    assert moved > 0 and (weights[0] - weights[1]).abs().max() < 1e-2 * moved


def test_the_trial_tells_what_is_wrong(backward, monkeypatch) -> None:
    cpu = torch.device("cpu")
    assert flex_fault(4, 2, 16, device=cpu, dtype=torch.float32) is None
    assert flex_fault(2, 2, 16, device=cpu, dtype=torch.bfloat16) is None
    with monkeypatch.context() as patch:
        right = visible_spans([(BLOCK, (BLOCK + 3, 9)), (0, (20,))], 5)
        patch.setattr(FlexRow, "mask", lambda self, window, device: block_mask(right))
        assert "differs from plain attention by" in (flex_fault(4, 2, 16, device=cpu, dtype=torch.float32) or "")
    monkeypatch.undo()
    fault = flex_fault(4, 2, 16, device=cpu, dtype=torch.float32)
    assert fault is not None and "NotImplementedError" in fault and "backward on CPU" in fault


def test_a_run_on_a_cpu_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=r"packed_attention='flex'.*on a CPU.*packed_attention at 'auto'"):
        GRPOConfig(output_dir=str(tmp_path), packed_attention="flex", use_cpu=True, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"packed_attention='flash'.*auto, flex"):
        GRPOConfig(output_dir=str(tmp_path), packed_attention="flash", use_cpu=True, max_steps=1)


@pytest.mark.parametrize(
    ("device", "present", "words"),
    [("cuda", True, None), ("cuda", False, "has no FlexAttention"), ("mps", True, "cannot act on mps")],
)
def test_the_configuration_needs_a_gpu_and_a_torch_that_has_it(tmp_path, monkeypatch, device, present, words) -> None:
    given = config(tmp_path)
    given.packed_attention = "flex"
    monkeypatch.setattr(type(given), "device", torch.device(device))
    monkeypatch.setattr("envgrad.config.packing.has_flex_attention", lambda: present)
    if words is None:
        config_module.check_packing(given)
        return
    with pytest.raises(ConfigurationError, match=words):
        config_module.check_packing(given)


def test_models_that_cannot_are_refused(tmp_path, monkeypatch) -> None:
    given = config(tmp_path)
    model = tiny_llama()
    forward = install_policy_forward(model)
    forward.packed_attention = "flex"  # from another trainer
    setup.choose_packed_attention(given, "shared", forward)
    assert forward.packed_attention == "auto"
    given.packed_attention = "flex"
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM are not packed"):
        setup.choose_packed_attention(given, "single", forward)
    with pytest.raises(ConfigurationError, match=r"does not run here.*CPU.*leave packed_attention at 'auto'"):
        setup.choose_packed_attention(given, "shared", forward)
    dropping = install_policy_forward(tiny_llama(attention_dropout=0.1))
    with pytest.raises(ConfigurationError, match="disable_dropout=True"):
        setup.choose_packed_attention(given, "shared", dropping)
    seen: list[object] = []
    monkeypatch.setattr(setup, "flex_fault", lambda *heads, device, dtype: seen.extend((*heads, dtype)))
    setup.choose_packed_attention(given, "shared", forward)
    assert seen == [4, 2, 4, torch.float32] and forward.packed_attention == "flex"
