"""Measured figures in the place of estimated ones: of ``envgrad bench``, of a run's log, or fitted on several runs.

=========================  ===========================================================================================
a file                     what it replaces
=========================  ===========================================================================================
``envgrad bench --json``   the device's rates and the shares of them that decoding and training reach; both hold for
                           other models on the same device
``trainer_state.json``     of a run's folder: seconds a token of training and of sampling, of the optimizer and of a
                           publish; they hold for that model, that device and about those batches
fitted costs               all of it: ``python -m benchmarks.scaling FILE --costs OUT`` writes them
=========================  ===========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from envgrad.errors import ConfigurationError
from envgrad.scaling.costs import Costs
from envgrad.scaling.roofline import Machines


def read_measured(path: Path) -> dict[str, Any]:
    """The file's content.

    Raises:
        ConfigurationError: it cannot be read, or is of none of the three kinds.
    """
    file = path / "trainer_state.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--measured {path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or not any(name in data for name in ("costs", "machine", "log_history")):
        raise ConfigurationError(
            f"--measured {path} holds no measurement: give what `envgrad bench --json` printed, a checkpoint's folder "
            "(its trainer_state.json), or fitted costs"
        )
    return data


def measured_machines(machines: Machines, data: Mapping[str, Any]) -> Machines:
    """``machines`` with the rates that a benchmark measured; unchanged for other files.

    Raises:
        ConfigurationError: a benchmark whose model's floor is unknown.
    """
    if "decoding" not in data:
        return machines
    machine, decoding, training = data["machine"], data["decoding"], data["training"]
    shares = {"decoding": decoding["floor_share"], "training": training["floor_share"]}
    if None in shares.values():
        raise ConfigurationError(
            "the benchmark knows no floor of its model's operations, so that nothing follows for other batches: "
            "measure a dense model"
        )
    gpu = replace(
        machines.gpu,
        name=str(machine["device"]),
        rate=float(machine["matmul"]),
        reads=float(machine["reads"]),
        number_bytes=4 if machine["dtype"] == "float32" else 2,
    )
    # Decoding's share holds for products and reads alike, and has the step's fixed work in it.
    share = min(1.0, shares["decoding"])
    reached = replace(
        machines.reached, training=min(1.0, shares["training"]), prefill=share, reading=share, sampler_step=0.0
    )
    return replace(machines, gpu=gpu, reached=reached)


def measured_costs(costs: Costs, data: Mapping[str, Any]) -> Costs:
    """``costs`` with what ``data`` measured in the place of estimates.

    Raises:
        ConfigurationError: a log without the phases of a step.
    """
    if "costs" in data:
        return Costs.from_dict(data["costs"])
    if "log_history" in data:
        return _of_log(costs, data["log_history"])
    named = f"measured by envgrad bench: {data['machine']['device']}, {data.get('model', 'a model')}"
    return replace(costs, sources=costs.sources | {"sampler": named, "trainer": named})


def _of_log(costs: Costs, history: Sequence[Mapping[str, Any]]) -> Costs:
    entries = [one for one in history if "time/step" in one and "tokens/forwarded" in one]
    if len(entries) < 2:
        raise ConfigurationError(
            "the run's log has no two entries with time/step and tokens/forwarded: train a few more steps, with "
            "logging_steps=1"
        )
    entries = entries[1:]  # the first has what is made once

    def mean(name: str) -> float:
        return fmean(float(one.get(name, 0.0)) for one in entries)

    named = f"measured: a run's log of {len(entries)} entries"
    trainer = replace(
        costs.trainer,
        token=(mean("time/forward_backward") + mean("time/logprobs")) / mean("tokens/forwarded"),
        pair=0.0,
        episode=0.0,
        step=mean("time/packing") + mean("time/optimizer"),
    )
    sources = {"trainer": named}
    sampling, forwarded = mean("time/prefill") + mean("time/decode"), mean("tokens/rollout_forwarded")
    sampler = costs.sampler
    if sampling and forwarded:
        # One batch size tells nothing of a step's fixed part: the whole is laid on the tokens, as they were batched.
        each = sampling / forwarded
        sampler = replace(sampler, step=0.0, row=each, context=0.0, prefill=each, prefill_step=0.0)
        sources["sampler"] = named + ", at its own number of rows"
    storage = costs.storage
    if mean("time/publish"):
        storage, sources["publish"] = replace(storage, publish=mean("time/publish")), named
    return replace(costs, trainer=trainer, sampler=sampler, storage=storage, sources=costs.sources | sources)
