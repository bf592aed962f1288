from __future__ import annotations

import math
from dataclasses import replace

import torch

from envgrad.logprobs import PolicyOutputs
from envgrad.losses import (
    LossInputs,
)
from envgrad.packing import pack
from helpers.losses import row

LOG2 = math.log(2.0)


def test_inputs_of_a_micro_batch() -> None:
    micro_batch = pack([row(2), row(3)], [0.5, 0.25]).micro_batches[0]
    micro_batch = replace(micro_batch, ref_logprobs=torch.full((5,), 7.0), importance=torch.full((5,), 8.0))
    found = LossInputs.of(micro_batch, PolicyOutputs(torch.full((5,), 1.0), torch.full((5,), 2.0)))
    for name in ("old_logprobs", "sampler_logprobs", "advantages", "weights", "sample_index", "num_samples",
                 "total_tokens", "ref_logprobs", "importance"):  # fmt: skip
        assert getattr(found, name) is getattr(micro_batch, name)
    assert found.logprobs[0] == 1 and found.entropy is not None and found.entropy[0] == 2
