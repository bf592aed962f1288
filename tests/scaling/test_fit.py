"""A fit finds the costs that made the figures."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import Costs, LoopCosts, SamplerCosts, TrainerCosts
from envgrad.scaling.fit import (
    WARM_UP,
    fit,
    fit_sampler,
    fit_trainer,
    least_squares,
    read_once,
    read_runs,
    simulated_seconds,
)
from envgrad.scaling.simulation import simulate
from envgrad.scaling.workload import Draw, Workload

pytest.importorskip("simpy")

TRUE = Costs(
    sampler=SamplerCosts(
        step=2e-3, row=3e-5, context=2e-8, prefill=3e-5, prefill_step=1e-3, change=4e-4, shares_prompts=True
    ),
    trainer=TrainerCosts(step=0.03, episode=1e-3, token=8e-5, pair=2e-8),
    loop=LoopCosts(turn=6e-4, episode=2e-3),
    local=True,
    sampler_beside=1.4,
    trainer_beside=1.25,
)


def made(name: str, load: Workload, use: str = "fit") -> dict[str, Any]:
    """A run as if it had been measured at ``TRUE``."""
    found = simulate(load, TRUE, steps=6, warm_up=WARM_UP)
    tokens = load.groups * load.prompt_tokens + load.episodes * (load.row_tokens - load.prompt_tokens - 1)
    needed = load.row_tokens - 1
    pairs = load.groups * load.prompt_tokens * (load.prompt_tokens + 1) / 2
    pairs += load.episodes * (needed * (needed + 1) - load.prompt_tokens * (load.prompt_tokens + 1)) / 2
    passes = TRUE.trainer.token * tokens + TRUE.trainer.pair * pairs
    draw, rows = random.Random(name), []
    for prefilling in (False, True):
        for beside in (False, True) if load.asynchronous else (False,):
            for _ in range(4):
                count, each, row = draw.randint(5, 50), draw.randint(1, 60), draw.randint(50, 900)
                read = draw.randint(20, 900) if prefilling else 0
                one: dict[str, Any] = {
                    "prefilling": prefilling, "beside_training": beside, "steps": count, "rows": count * each,
                    "context": count * (row + load.prompt_tokens) * each, "prefill": count * read,
                }  # fmt: skip
                step = TRUE.sampler.seconds(rows=each, context=read_once(load, one) / count, prefill=read)
                step += 0.0 if prefilling else TRUE.sampler.change * found.changes
                rows.append(one | {"seconds": count * step * (TRUE.sampler_beside if beside else 1.0)})
    return {
        "name": name,
        "use": use,
        "load": load.as_dict(),
        "passes": [
            {
                "steps": [one.seconds for one in found.steps],
                "phases": {
                    "rollout": found.mean("waiting"),
                    "forward_backward": passes,
                    "async/wait_seconds": found.mean("waiting"),
                },
                "counts": {
                    "episodes": load.episodes, "prompt": load.prompt_tokens, "result": load.result_tokens,
                    "forwarded": tokens, "pairs": pairs,
                },
                "sampler": rows,
            }
        ],
    }  # fmt: skip


def load(groups: int, siblings: int, turns: int, tokens: int, prompt: int, **more: Any) -> Workload:
    return Workload(
        groups=groups, siblings=siblings, turns=Draw(mean=turns), prompt_tokens=prompt, turn_tokens=Draw(mean=tokens),
        result_tokens=20, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Mapping[str, Any]:
    return {
        "runs": [
            made("base", load(4, 4, 3, 24, 64)),
            made("long", load(8, 8, 1, 48, 128)),
            made("short", load(2, 4, 8, 12, 64)),
            made("wide", load(4, 8, 4, 32, 300)),
            made("beside", load(4, 4, 3, 32, 64, asynchronous=True)),
            made("check", load(6, 4, 2, 40, 64, latency=Draw(mean=0.05)), use="check"),
        ]
    }


def test_sums_give_the_sampler_and_the_trainer_back(data: Mapping[str, Any]) -> None:
    inline = [run for run in read_runs(data) if not run.load.asynchronous and run.use == "fit"]
    changes = [simulate(run.load, TRUE, steps=6, warm_up=WARM_UP).changes for run in inline]
    assert max(changes) > 2 * min(changes) > 0
    assert asdict(fit_sampler(inline, changes)) == pytest.approx(asdict(TRUE.sampler), rel=1e-6)
    found = fit_trainer(inline)
    assert (found.token, found.pair) == pytest.approx((TRUE.trainer.token, TRUE.trainer.pair), rel=1e-6)
    for run in inline:
        seconds = found.seconds(episodes=run.load.episodes, tokens=run.counts["forwarded"], pairs=run.counts["pairs"])
        assert seconds == pytest.approx(run.training, rel=1e-6)


def test_what_shows_in_no_sum_is_found_by_simulating(data: Mapping[str, Any]) -> None:
    found = fit(read_runs(data))
    assert found.sampler_beside == pytest.approx(TRUE.sampler_beside, rel=0.02)
    assert found.trainer_beside == pytest.approx(TRUE.trainer_beside, rel=0.05)
    for run in read_runs(data):
        assert simulated_seconds(run, found) == pytest.approx(run.seconds, rel=0.05), run.name
    assert found.sources["sampler"] == "measured: fitted on base, long, short, wide, beside"


def test_no_coefficient_is_below_zero() -> None:
    found = least_squares([[1.0, 5.0, 0.0], [1.0, 4.0, 0.0], [1.0, 3.0, 0.0]], [1.0, 2.0, 3.0])
    assert min(found) >= 0.0 and found[2] == 0.0


def test_another_file() -> None:
    with pytest.raises(ConfigurationError, match=r"no measured runs.*--measure FILE"):
        read_runs({"runs": [{"name": "x"}]})
    with pytest.raises(ConfigurationError, match="no measured runs"):
        read_runs({})


def test_nothing_to_fit(data: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="synchronous runs"):
        fit([run for run in read_runs(data) if run.use == "check"])
