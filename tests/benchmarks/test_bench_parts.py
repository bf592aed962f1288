"""The pure parts of the benchmark: its statistics, its floor, its table of lengths, its report."""

from __future__ import annotations

import asyncio
import doctest
from datetime import date

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import decoding, floor, pairs, ratios, report, workloads
from benchmarks.bare import decode_bare
from benchmarks.floor import Floor, ModelShape, RowSize, rollout_flops, training_flops
from benchmarks.ours import FILLER, FixedTurns
from benchmarks.pairs import Measured, Setting, Step, check_counts
from benchmarks.ratios import fit_line, fit_power, paired_ratios
from benchmarks.report import Report, turns_text, write_section
from benchmarks.trl_side import FixedLengths
from benchmarks.workloads import WORKLOADS, Workload
from envgrad.sampling.sampler import Sampler, SamplingParams, Session
from envgrad.sampling.scripted import ScriptedSampler
from helpers.models import tiny_llama

MODULES = (decoding, floor, pairs, ratios, report, workloads)
SHAPE = ModelShape(layers=2, width=3, heads=2, kv_heads=1, head_size=4, mlp=5, vocabulary=7)


def test_our_side_samples_through_the_whole_protocol():
    members = {name for name in vars(Sampler) if not name.startswith("_")}
    assert members and members <= set(dir(FixedTurns))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


def test_a_layer_counts_every_weight_once():
    # q 3x8, k and v 3x4 each, o 8x3, gated MLP 3 times 3x5
    assert SHAPE.layer_weights == 24 + 12 + 12 + 24 + 45


def test_a_token_costs_its_weights_and_what_it_attends_to():
    weights = 2 * 117
    assert SHAPE.body(0, 1) == 2 * (weights + 4 * 8 * 1)
    assert SHAPE.body(4, 6) == 2 * (2 * weights + 4 * 8 * (5 + 6))


@given(st.lists(st.integers(0, 30), min_size=3, max_size=3))
def test_a_row_costs_the_same_in_any_pieces(cuts):
    first, second, third = sorted(cuts)
    assert SHAPE.body(first, third) == SHAPE.body(first, second) + SHAPE.body(second, third)


def test_a_prompt_is_counted_once_a_group_and_a_rows_last_token_is_not():
    rows = [
        RowSize(group=0, prompt=3, sampled=2, given=1),
        RowSize(group=0, prompt=3, sampled=1, given=0),
        RowSize(group=1, prompt=2, sampled=1, given=0),
    ]
    body = SHAPE.body(0, 3) + SHAPE.body(3, 5) + SHAPE.body(0, 2)
    head = 2 * 3 * 7 * (4 - 1)  # four sampled tokens, of which two share the prompt's logits
    assert rollout_flops(SHAPE, rows) == body + head
    assert training_flops(SHAPE, rows) == 3 * (body + head)


def test_the_floor_is_operations_over_the_rate():
    least = Floor(rollout=100, training=300, rate=50.0)
    assert [least.seconds(part) for part in ("rollout", "train", "step")] == [2.0, 6.0, 8.0]


def test_ratios_are_taken_pair_by_pair():
    spread = paired_ratios([1.0, 10.0, 2.0], [5.0, 20.0, 6.0])
    assert (spread.median, spread.low, spread.high) == (3.0, 2.0, 5.0)
    with pytest.raises(ValueError):
        paired_ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        paired_ratios([], [])


def test_fits_of_hand_computed_points():
    line = fit_line([0.0, 1.0, 2.0], [0.0, 0.0, 3.0])
    assert (line.slope, line.offset) == (1.5, -0.5)
    assert line.explained == pytest.approx(0.75)
    assert fit_power([1.0, 10.0], [2.0, 200.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="two different"):
        fit_line([1.0, 1.0], [2.0, 3.0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_keep_their_promises(name):
    work = WORKLOADS[name]
    plan = work.plan()
    assert len(plan) == work.episodes and work.episodes % 8 == 0
    assert max(len(turns) for turns in plan) == work.most_calls + 1
    assert all(length >= 2 for turns in plan for length in turns)
    assert work.calls == sum(len(turns) for turns in plan) - len(plan)
    assert Workload.from_json(work.quick().to_json()) == work.quick()
    assert work.tuned_as in ("", *WORKLOADS)


def test_calls_double_with_the_turns():
    assert [WORKLOADS[f"small-{turns}"].calls for turns in (6, 12)] == [140, 280]


def test_trl_rows_end_at_their_lengths_and_not_before():
    processor = FixedLengths([1, 2], ends=[3, 4], forbidden=[3, 4])
    first = processor(torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 5))
    assert first[0].argmax() == 3 and torch.isinf(first[0]).sum() == 4
    assert first[1].tolist() == [1.0, 1.0, 1.0, float("-inf"), float("-inf")]
    second = processor(torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 5))
    assert second[1].argmax() == 4 and torch.isinf(second[1]).sum() == 4


def test_the_bare_loop_decodes_what_a_plain_forward_says():
    model = tiny_llama().eval()
    prompts, lengths = [[5, 6, 7], [9, 8, 7]], [4, 2]
    chosen = []

    def greedy(logits):
        chosen.append(logits.argmax(-1, keepdim=True))
        return chosen[-1]

    assert decode_bare(model, prompts, lengths, greedy) == 6
    assert [tokens.shape[0] for tokens in chosen] == [2, 2, 1, 1]
    for row, length in enumerate(lengths):
        ids = list(prompts[row])
        for step in range(length):
            expected = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            assert int(chosen[step][row]) == expected
            ids.append(expected)
    with pytest.raises(ValueError, match="one length"):
        decode_bare(model, [[1], [1, 2]], [1, 1])


@pytest.mark.parametrize(("sampled", "expected"), [([7, 8, 9], (7, 8, 1)), ([7, 0, 1, 5], (7, FILLER, FILLER, 1))])
def test_our_turns_end_once_and_at_their_lengths(sampled, expected):
    work = Workload(name="w", title="", model="small", groups=1, prompt_tokens=4, lengths=(len(sampled),), most_calls=6)
    asked = []

    def script(prompt_ids, params, session):
        asked.append(params.max_tokens)
        return sampled

    sampler = FixedTurns(ScriptedSampler(script), work, end=1, no_call=0)
    session = Session(key="s", group="g", order=(3, 7, 0))  # the eighth sibling makes two calls
    sampler.begin(session)
    params = SamplingParams(max_tokens=99, stop_token_ids=(1,))
    turns = [asyncio.run(sampler.sample([5], params, session)) for _ in range(3)]
    assert [turn.token_ids for turn in turns] == [expected, expected, (*expected[:-1], 0)]
    assert {turn.stop_reason for turn in turns} == {"stop"} and asked == [len(sampled)] * 3


def step(seconds, *, sampled=4, calls=2, memory=1 << 20, forwarded=12):
    counts = {"prompt": [4] * 8, "sampled": [sampled] * 8, "given": [1] * 8, "calls": calls}
    return Step(
        seconds=seconds, rollout=seconds / 4, train=3 * seconds / 4, memory=memory, counts=counts,
        forwarded={"rollout": forwarded, "training": forwarded},
    )  # fmt: skip


def test_unequal_work_is_no_comparison():
    check_counts(step(1.0), step(2.0))
    with pytest.raises(AssertionError, match="sampled tokens: ours 32, trl's 40"):
        check_counts(step(1.0), step(1.0, sampled=5))
    with pytest.raises(AssertionError, match="calls"):
        check_counts(step(1.0), step(1.0, calls=3))


def measured(name, ours, theirs):
    settings = {"ours": Setting(kind="ours", threads=1), "trl": Setting(kind="trl", threads=2, splits=4)}
    return Measured(
        workload=WORKLOADS[name], shape=SHAPE, options={"envgrad": {"a": 1}, "trl 1.16.0": {"a": 1, "b": 2}},
        settings=settings, steps={"ours": [step(one) for one in ours], "trl": [step(one) for one in theirs]},
        rates=[1e6, 2e6], loads=[(0.5, 0.0), (4.0, 0.9)],
    )  # fmt: skip


def test_what_was_measured_is_compared_with_trl_and_with_the_floor():
    one = measured("small-6", [1.0, 2.0], [4.0, 6.0])
    assert one.ratio is not None and one.ratio.median == 3.5
    least = (rollout_flops(SHAPE, one.rows) + training_flops(SHAPE, one.rows)) / 2e6
    assert one.distance("ours").low == pytest.approx(1.0 / least)
    # one prompt of 4 tokens, and 8 rows of 5 of which the last is not forwarded
    assert one.forwarded_ratio("training") == 12 / (4 + 8 * 4)
    assert measured("long-prompt", [1.0], [2.0]).seconds("ours").median == 0.75


def test_the_report_shows_ratios_growth_and_noise(tmp_path):
    steps = [
        measured("small-3", [1.0, 1.0], [2.0, 2.0]),
        measured("small-6", [2.0, 2.0], [8.0, 8.0]),
        measured("small-12", [4.0, 4.0], [32.0, 32.0]),
    ]
    text = Report(machine="a machine", day=date(2026, 1, 2), steps=steps, failed={"x": "why"}).markdown()
    assert "## 2026-01-02, a machine" in text and "**4.00** (4.00 to 4.00)" in text
    assert "Not quiet: before 3 of 6 pairs" in text and "- x: why" in text
    assert "2 threads, 4 micro-batches" in text
    envgrad, trl = turns_text(steps).splitlines()[2:]
    assert float(envgrad.split("|")[-2]) == pytest.approx(0.94, abs=0.01)  # 64, 140, 280 calls
    assert float(trl.split("|")[-2]) == pytest.approx(1.88, abs=0.01)
    assert turns_text(steps[:2]) == ""
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\nHead.\n\n## 2025, old\n\nOld.\n", encoding="utf-8")
    write_section("## new\n\ntext\n", results)
    assert results.read_text(encoding="utf-8") == "# Results\n\nHead.\n\n## new\n\ntext\n\n## 2025, old\n\nOld.\n"
