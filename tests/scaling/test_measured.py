"""What a file measured takes the place of what was estimated, and is labelled as measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import Costs, SamplerCosts, TrainerCosts
from envgrad.scaling.hardware import Reached, accelerator
from envgrad.scaling.measured import read_measured
from envgrad.scaling.plan import Plan, make_plan
from envgrad.scaling.roofline import Machines
from envgrad.scaling.shapes import SHAPES
from envgrad.scaling.workload import Draw, Workload

LOAD = Workload(groups=8, siblings=8, turns=Draw(mean=4), prompt_tokens=500, turn_tokens=Draw(mean=100))
BENCH = {
    "model": "Qwen/Qwen3-0.6B",
    "parameters": 596_000_000,
    "machine": {"device": "NVIDIA H200", "threads": 8, "dtype": "bfloat16", "matmul": 700e12, "reads": 4e12},
    "decoding": {"floor_share": 0.5, "tokens_per_second": 1000.0},
    "training": {"floor_share": 0.35, "tokens_per_second": 9000.0},
}
LOG = [
    {"time/step": 9.0, "time/forward_backward": 8.0, "tokens/forwarded": 1000.0},
    *[
        {
            "time/step": 3.0, "time/forward_backward": 2.0, "tokens/forwarded": 1000.0, "time/optimizer": 0.5,
            "time/prefill": 0.1, "time/decode": 0.3, "tokens/rollout_forwarded": 2000.0, "time/publish": 0.05,
        }
    ]
    * 2,
]  # fmt: skip


def plan(measured: dict[str, Any] | None = None) -> Plan:
    machines = Machines(gpu=accelerator("h100"), gpus=4, trainers=2, reached=Reached())
    return make_plan(SHAPES["0.6B"], LOAD, machines, measured)


def write(folder: Path, data: object, name: str = "measured.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_benchmark_gives_rates_and_shares(tmp_path: Path) -> None:
    found, estimated = plan(read_measured(write(tmp_path, BENCH))), plan()
    assert found.machines.gpu.rate == 700e12 and found.machines.reached.training == 0.35
    assert found.costs.trainer.token / estimated.costs.trainer.token == pytest.approx(989e12 * 0.40 / (700e12 * 0.35))
    weights = (SHAPES["0.6B"].body + SHAPES["0.6B"].head_weights) * 2
    assert found.costs.sampler.step == pytest.approx(weights / (4e12 * 0.5))
    assert found.costs.sources["trainer"].startswith("measured by envgrad bench")
    assert estimated.costs.sources["trainer"].startswith("not measured")
    assert found.costs.sources["publish"].startswith("not measured")


def test_a_benchmark_without_a_floor(tmp_path: Path) -> None:
    data = BENCH | {"training": {"floor_share": None, "tokens_per_second": 1.0}}
    with pytest.raises(ConfigurationError, match="no floor"):
        plan(read_measured(write(tmp_path, data)))


def test_a_runs_log_gives_seconds_a_token(tmp_path: Path) -> None:
    write(tmp_path, {"log_history": LOG}, "trainer_state.json")
    costs = plan(read_measured(tmp_path)).costs  # the folder of a checkpoint
    assert (costs.trainer.token, costs.trainer.step) == pytest.approx((2e-3, 0.5))
    assert (costs.sampler.row, costs.sampler.step) == pytest.approx((2e-4, 0.0))
    assert costs.storage.publish == pytest.approx(0.05)
    assert costs.sources["sampler"].startswith("measured") and costs.sources["checkpoint"].startswith("not measured")


def test_a_log_without_phases(tmp_path: Path) -> None:
    path = write(tmp_path, {"log_history": [{"loss": 1.0}]})
    with pytest.raises(ConfigurationError, match="logging_steps=1"):
        plan(read_measured(path))


def test_fitted_costs_replace_all(tmp_path: Path) -> None:
    costs = Costs(sampler=SamplerCosts(step=1.0), trainer=TrainerCosts(step=7.0), sources={"trainer": "measured"})
    found = plan(read_measured(write(tmp_path, {"costs": costs.as_dict()})))
    assert found.costs == costs
    assert found.step.training == pytest.approx(7.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"else": 1}'])
def test_what_is_no_measurement(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="--measured"):
        read_measured(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_measured(tmp_path / "nowhere.json")
