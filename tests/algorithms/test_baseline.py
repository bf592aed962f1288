"""Comparing with the batch instead of the group, where siblings do not share a task."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from envgrad import GRPO, RLOO, GRPOConfig, RLOOConfig
from envgrad.algorithms.base import Algorithm
from envgrad.errors import ConfigurationError
from helpers.episodes import episode, group_of
from helpers.trainers import Kind, by_sibling, script
from helpers.world import Counter, call, turn

GROUPS = [
    group_of(episode(0, 0, 1.0), episode(0, 1, 1.0)),
    group_of(episode(1, 0, 0.0), episode(1, 1, 2.0), episode(1, 2, None)),
]


def advantages(algorithm: Algorithm) -> list[float]:
    return [max(sample.advantages, key=abs) for sample in algorithm.credit(GROUPS)]


def test_by_hand() -> None:
    # mean of 1 1 0 2 is 1; leave-one-out: 1 - 1, 1 - 1, 0 - 4/3, 2 - 2/3
    assert advantages(GRPO(baseline="batch", scale_rewards="none")) == [0.0, 0.0, -1.0, 1.0]
    assert advantages(RLOO(baseline="batch", beta=0.0)) == pytest.approx([0.0, 0.0, -4 / 3, 4 / 3])
    assert advantages(GRPO(scale_rewards="none")) == [0.0, 0.0, -1.0, 1.0]
    assert not GRPO(baseline="batch", scale_rewards="none").compares_siblings and GRPO().compares_siblings
    assert not RLOO(baseline="batch").compares_siblings and RLOO().compares_siblings


def test_a_group_of_equal_rewards_teaches_beside_a_worse_one() -> None:
    groups = [group_of(episode(0, 0, 1.0), episode(0, 1, 1.0)), group_of(episode(1, 0, 0.0), episode(1, 1, 0.0))]
    of_group = [max(one.advantages, key=abs) for one in GRPO(scale_rewards="none").credit(groups)]
    of_batch = [max(one.advantages, key=abs) for one in GRPO(scale_rewards="none", baseline="batch").credit(groups)]
    assert of_group == [0.0] * 4 and of_batch == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"baseline": "batch"}, "set scale_rewards to 'batch' or 'none'"),
        ({"baseline": "world"}, "baseline=world|baseline='world'"),
        ({"baseline": "batch", "scale_rewards": "none", "credit": "turn"}, "credit='turn', which compares siblings"),
        ({"baseline": "batch", "scale_rewards": "batch", "dynamic_sampling": True}, "turn one of them off"),
    ],
)
def test_what_cannot_act_beside_it_is_refused(tmp_path: Path, options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        GRPOConfig(output_dir=str(tmp_path), max_steps=1, **options)  # type: ignore[arg-type]


def test_the_configurations_pass_it_on(tmp_path: Path) -> None:
    grpo = GRPOConfig(output_dir=str(tmp_path), max_steps=1, baseline="batch", scale_rewards="batch")
    rloo = RLOOConfig(output_dir=str(tmp_path), max_steps=1, baseline="batch")
    assert (grpo.algorithm().baseline, rloo.algorithm().baseline) == ("batch", "batch")
    with pytest.raises(ConfigurationError, match="turn one of them off"):
        RLOOConfig(output_dir=str(tmp_path), max_steps=1, baseline="batch", dynamic_sampling=True)


class ByChance(Counter):
    determinism = "none"


@pytest.mark.parametrize("baseline", ["group", "batch"])
def test_an_environment_of_chance_is_warned_of_unless_batches_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, baseline: str
) -> None:
    script(monkeypatch, by_sibling([turn(call("inc", n=2)), turn("done")], [turn("done")]))
    with caplog.at_level(logging.WARNING, logger="envgrad"):
        trainer = Kind("RLOO").make(
            tmp_path, environment_factory=ByChance, options={"baseline": baseline, "max_steps": 1}
        )
    assert ("determinism is 'none'" in caplog.text) is (baseline == "group")
    trainer.train()
    assert trainer.state.global_step == 1
