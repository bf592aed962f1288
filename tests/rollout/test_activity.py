from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgrad.rollout.activity import ROLLOUT_PHASES, Activity, ActivityReport, Span, partition

KINDS = (*ROLLOUT_PHASES, "sample")


def test_a_forward_has_its_moments_whatever_goes_on_beside_it():
    spans = [
        Span("tools", 0.0, 10.0),
        Span("prefill", 2.0, 3.0),
        Span("decode", 3.0, 6.0),
        Span("sample", 0.0, 20.0),
    ]
    seconds = partition(spans, 0.0, 20.0)
    assert seconds == {"reset": 0.0, "prefill": 1.0, "decode": 3.0, "tools": 6.0, "reward": 0.0}


def test_other_moments_are_shared_by_the_episodes_in_user_code():
    spans = [Span("tools", 0.0, 4.0, 3), Span("reset", 0.0, 4.0), Span("reward", 4.0, 6.0, 8)]
    assert partition(spans, 0.0, 6.0) == {"reset": 1.0, "prefill": 0.0, "decode": 0.0, "tools": 3.0, "reward": 2.0}


def test_what_is_outside_is_cut_off():
    spans = [Span("tools", -5.0, 1.0), Span("decode", 9.0, 30.0, tokens=7), Span("reset", 40.0, 50.0)]
    report = ActivityReport.of(spans, 0.0, 10.0)
    assert report.seconds == {"reset": 0.0, "prefill": 0.0, "decode": 1.0, "tools": 1.0, "reward": 0.0}
    assert report.episode_seconds == {"reset": 0.0, "tools": 1.0, "reward": 0.0, "sample": 0.0}
    assert report.forwarded_tokens == 7


@given(
    st.lists(
        st.builds(
            lambda kind, start, length, episodes: Span(kind, float(start), float(start + length), episodes),
            st.sampled_from(KINDS), st.integers(-3, 12), st.integers(0, 6), st.integers(1, 3),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_each_second_goes_where_it_must(spans):
    expected = dict.fromkeys(ROLLOUT_PHASES, 0.0)
    for second in range(10):
        going = [one for one in spans if one.start <= second < one.end and one.kind != "sample"]
        forwards = [one for one in going if one.kind in ("prefill", "decode")]
        for one in forwards or going:
            expected[one.kind] += one.episodes / sum(other.episodes for other in forwards or going)
    assert partition(spans, 0.0, 10.0) == pytest.approx(expected)


def test_a_step_is_cut_by_its_tokens():
    activity = Activity()
    activity.forwarded(0.0, 4.0, prefill=6, decode=2)
    activity.forwarded(4.0, 5.0, prefill=0, decode=2)
    activity.forwarded(5.0, 6.0, prefill=3, decode=0)
    activity.forwarded(6.0, 7.0, prefill=0, decode=0)  # sampled from logits that were kept
    assert [(one.kind, one.start, one.end, one.tokens) for one in activity.take()] == [
        ("prefill", 0.0, 3.0, 6), ("decode", 3.0, 4.0, 2), ("decode", 4.0, 5.0, 2), ("prefill", 5.0, 6.0, 3),
        ("decode", 6.0, 7.0, 0),
    ]  # fmt: skip
    assert activity.take() == []


def test_a_span_ends_also_where_an_error_does():
    now = iter([1.0, 4.0])
    activity = Activity(clock=lambda: next(now))
    with pytest.raises(OSError), activity.during("reward", 8):
        raise OSError
    assert activity.take() == [Span("reward", 1.0, 4.0, 8)]
