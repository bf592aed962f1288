"""Runs that play what they train: several processes and one, resumed with another number of them, and their metrics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from envgrad.episodes.reader import EpisodeReader
from helpers.rank_runs import Ended, relative, trained
from helpers.zygote import Zygote


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return trained(zygote, tmp_path_factory.mktemp("alone"), "real", 1, "GRPO", "6")


@pytest.fixture(scope="module")
def pair(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return trained(zygote, tmp_path_factory.mktemp("pair"), "real", 2, "GRPO", "6")


def test_two_processes_learn_what_one_does(alone: Ended, pair: Ended) -> None:
    assert relative(pair.change(), alone.change()) <= 1e-3
    assert torch.equal(pair.change(0), pair.change(1))


LOCAL = (
    "time/",
    "share/",
    "tokens_per_second/",
    "mfu/",
    "episode_seconds/",
    "train_runtime",
    "train_samples",
    "train_st",
)
"""of a machine's clock"""
OWN = ("tokens/rollout_forwarded", "tokens/forwarded", "step_time", "total_flos")
"""of how work was cut: a prompt that two ranks need is forwarded twice"""


def test_metrics_are_those_of_a_single_process(alone: Ended, pair: Ended) -> None:
    compared = set()
    for one, two in zip(alone.log(), pair.log(), strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            if not name.startswith(LOCAL + OWN):
                assert math.isclose(value, two[name], rel_tol=2e-3, abs_tol=1e-5), (name, value, two[name])
                compared.add(name)
    assert {"loss", "reward", "reward_std", "grad_norm", "ratio/max", "tokens/trained", "num_tokens"} <= compared
    assert {"completions/mean_length", "sampler_mismatch", "epoch", "learning_rate"} <= compared


def test_one_process_writes(pair: Ended) -> None:
    run = pair.folder / "run"
    assert sorted(path.name for path in run.glob("*") if path.name.startswith((".", "checkpoint"))) == [
        "checkpoint-2", "checkpoint-4", "checkpoint-6",
    ]  # fmt: skip
    assert (run / "checkpoint-4" / "rng_state_1.pth").exists()
    with EpisodeReader(run) as reader:
        assert reader.count() == 6 * 16


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_a_run_goes_on_with_any_number_of_processes(
    zygote: Zygote, tmp_path: Path, alone: Ended, pair: Ended, sizes: tuple[int, int]
) -> None:
    whole = pair if sizes[0] == 2 else alone
    checkpoint = whole.folder / "run" / "checkpoint-2"
    again = trained(zygote, tmp_path, "real", sizes[1], "GRPO", "6", str(checkpoint))
    assert again.log()[-1]["step"] == 6
    first = whole.log()[2:6]
    second = [entry for entry in again.log() if entry["step"] > 2 and "reward" in entry]
    assert [entry["num_tokens"] for entry in second[:4]] == [entry["num_tokens"] for entry in first]
    for one, two in zip(first, second, strict=False):
        assert math.isclose(one["loss"], two["loss"], rel_tol=2e-3, abs_tol=1e-5)
    assert relative(again.change(), whole.change()) <= 1e-3
    if sizes == (2, 2):
        assert torch.equal(again.change(), whole.change())
