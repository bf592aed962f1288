"""One seed fixes the whole run: tasks, sampling, packing, updates, dropout, and the record of it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from envgrad import StepResult
from envgrad.episodes import EpisodeReader, EpisodeRecord
from envgrad.episodes.replay import replay_episode
from helpers.models import tiny_llama
from helpers.trainers import NAMES, Kind

peft = pytest.importorskip("peft")


class Letters:
    """Pays for the letters that are written, each its own price; the task's length comes from its seed."""

    def reset(self, seed: int) -> str:
        self.turns = 1 + seed % 2
        return f"Write {seed % 97}."

    def step(self, message: str) -> StepResult:
        self.turns -= 1
        paid = sum(map(ord, message)) % 97 / 96
        return StepResult("more", reward=paid, done=not self.turns)

    def get_feedback(self) -> str:
        return "Use letters."


def played(kind: Kind, folder: Path, seed: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights after three steps with LoRA, dropout, truncated sampling and two passes; and the episode log."""
    options: dict[str, object] = {
        "max_steps": 3, "deterministic": True, "seed": seed, "top_p": 0.9, "top_k": 200, "max_completion_length": 24,
        "per_device_train_batch_size": 4, "num_generations": 2, "max_tokens_per_microbatch": 64, "eval_tasks": 2,
    }  # fmt: skip
    if kind.name == "SDPO":
        options |= {"success_reward_threshold": 0.1}
    lora = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = kind.make(folder, model=tiny_llama(), options=options, environment_factory=Letters, peft_config=lora)
    trainer.train()
    trainer.evaluate()
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert weights and any(bool(value.abs().sum()) for name, value in weights.items() if "lora_B" in name)
    records = [record | {"seconds": None} for record in trainer.episode_log.read()]
    trainer.close()
    return weights, records


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_of_one_seed_are_equal_bit_for_bit(name: str, tmp_path: Path) -> None:
    kind = Kind(name)
    weights, records = played(kind, tmp_path / "first", 5)
    again, others = played(kind, tmp_path / "second", 5)
    assert records == others and len(records) == 3 * 4 + 2
    assert all(torch.equal(value, again[key]) for key, value in weights.items())
    if name == "GRPO":
        different, _ = played(kind, tmp_path / "third", 6)
        assert not all(torch.equal(value, different[key]) for key, value in weights.items())


def test_a_trainers_record_holds_credit_and_its_own_logprobs_and_replays_equal(tmp_path: Path) -> None:
    """Dropout makes the trainer's log-probs its own; advantages are those of the loss."""
    played(Kind("GRPO"), tmp_path, 5)
    with EpisodeReader(tmp_path) as reader:
        train = [reader.episode(row.number) for row in reader.rows(order="oldest", limit=None) if row.split == "train"]
        for record in train:
            assert replay_episode(reader, record.summary.number).equal
            _check_tokens(record)
        for group in {record.summary.group for record in train}:
            siblings = [record.summary for record in train if record.summary.group == group]
            rewards = [row.reward for row in siblings]
            if rewards[0] != rewards[1]:  # (r - mean) / std of two is +-0.7071
                assert [abs(row.advantage or 0.0) for row in siblings] == pytest.approx([0.7071, 0.7071], abs=1e-2)
        assert {step.step for step in reader.steps() if "loss" in step.metrics} == {1, 2, 3}
        assert {step.step for step in reader.steps() if "eval_reward" in step.metrics} == {3}
        assert (reader.folder / "tokenizer.json").is_file() and reader.run()["algorithm"] == "GRPO"


def _check_tokens(record: EpisodeRecord) -> None:
    row = record.rows[0]
    assert row.advantages is not None
    own = {value for value, sampled in zip(row.advantages, row.mask, strict=True) if sampled}
    assert len(own) == 1 and {v for v, m in zip(row.advantages, row.mask, strict=True) if not m} == {0.0}
    if record.summary.advantage:
        assert row.trainer_logprobs is not None
        pairs = zip(row.trainer_logprobs, row.logprobs, row.mask, strict=True)
        gaps = [abs(trainer - sampler) for trainer, sampler, sampled in pairs if sampled]
        assert max(gaps) < 1e-3
