"""``make bench``: decoding against ``transformers.generate``, and packed against padded training, on one model.

    python -m benchmarks [--model starter] [--pairs 5]

Both sides do the same work on the same threads, in turn, several times; ratios are theirs over ours (above 1: we are
faster), median and range.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from envgrad.config import GRPOConfig
from envgrad.logprobs import install_policy_forward, policy_logprobs
from envgrad.packing import pack
from envgrad.training.model import load_policy
from envgrad.types import TrainingSample

from .decoding import decode_locally, decode_with_generate


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(name: str, ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> None:
    ours(), theirs()
    found = [(seconds(ours), seconds(theirs)) for _ in range(pairs)]
    ratios = sorted(b / a for a, b in found)
    print(
        f"{name:44s} ours {statistics.median(a for a, _ in found):7.3f} s   theirs "
        f"{statistics.median(b for _, b in found):7.3f} s   ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def samples_of(model: PreTrainedModel, prompt: int, own: int, groups: int, siblings: int) -> list[TrainingSample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for group in range(groups):
        head = torch.randint(0, model.config.vocab_size, (prompt,), generator=generator).tolist()
        for sibling in range(siblings):
            size = own // 2 + (own // 2) * (sibling + 1) // siblings
            tail = torch.randint(0, model.config.vocab_size, (size,), generator=generator).tolist()
            zeros, ones = (0,) * prompt, (1,) * size
            found.append(
                TrainingSample(
                    token_ids=(*head, *tail), mask=(*zeros, *ones), logprobs=(0.0,) * (prompt + size),
                    versions=(0,) * (prompt + size), advantages=(*(0.0 for _ in zeros), *(1.0 for _ in ones)),
                    prompt_length=prompt, group=str(group),
                )
            )  # fmt: skip
    return found


def train_packed(model: PreTrainedModel, samples: list[TrainingSample]) -> None:
    for packed in pack(samples, [1.0] * len(samples), max_tokens=8192).micro_batches:
        policy_logprobs(model, packed, entropy="none").logprobs.sum().backward()
    model.zero_grad()


def train_padded(model: PreTrainedModel, samples: list[TrainingSample]) -> None:
    """Rows padded to the longest, logits of every position: what a padded trainer does."""
    longest = max(len(sample.token_ids) for sample in samples)
    for start in range(0, len(samples), 8):
        rows = samples[start : start + 8]
        ids = torch.tensor([[*row.token_ids, *([0] * (longest - len(row.token_ids)))] for row in rows])
        mask = torch.tensor([[*row.mask, *([0] * (longest - len(row.mask)))] for row in rows], dtype=torch.bool)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        logprobs[mask[:, 1:]].sum().backward()
    model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    policy = load_policy(options.model, None, GRPOConfig(output_dir="runs/bench", use_cpu=True, max_steps=1), None)
    model = policy.base
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, model {options.model}: "
        f"{model.num_parameters() / 1e6:.1f} M parameters, float32"
    )
    for name, lengths in (
        ("equal lengths of 64", [64] * 32),
        ("lengths from 8 to 128", [8 + 4 * (i % 31) for i in range(32)]),
    ):
        compare(
            f"decoding 32 rows, {name}",
            lambda lengths=lengths: decode_locally(model, lengths),
            lambda lengths=lengths: decode_with_generate(model, lengths),
            options.pairs,
        )
    install_policy_forward(model)
    model.train()
    for name, prompt, own in (("prompt 40, answers to 80", 40, 80), ("prompt 400, answers to 40", 400, 40)):
        samples = samples_of(model, prompt, own, groups=2, siblings=8)
        compare(
            f"training 2 groups of 8, {name}",
            lambda samples=samples: train_packed(model, samples),
            lambda samples=samples: train_padded(model, samples),
            options.pairs,
        )


if __name__ == "__main__":
    main()
