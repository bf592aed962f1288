"""The policy in more than one part of a game: each is trained, by every algorithm, on the tokens that it sampled."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import envgrad
from envgrad.environments.policy import play_part, reward_part
from helpers.trainers import NAMES


class Duel:
    """Two moves of each; who says more different letters has the better of it."""

    async def reset(self, seed: int) -> str:
        self.chat: list[dict[str, Any]] = [{"role": "user", "content": f"Game {seed % 5}. You are black."}]
        self.score = {"white": 0, "black": 0}
        return f"Game {seed % 5}. You are white."

    async def step(self, message: str) -> tuple[str, bool]:
        self.chat.append({"role": "user", "content": f"White says: {message}"})
        said = await play_part("black", self.chat, max_tokens=10)
        if said is None:
            return "", True
        self.chat.append({"role": "assistant", "content": said})
        self.score["white"] += len(set(message))
        self.score["black"] += len(set(said))
        return f"Black says: {said}", len(self.chat) > 4

    async def get_reward(self) -> float:
        reward_part("black", float(self.score["black"]))
        return float(self.score["white"])


def trained(kind: str, folder: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 160, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "logging_steps": 1,
        "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    config = getattr(envgrad, f"{kind}Config")(**(options | changes))
    trainer = getattr(envgrad, f"{kind}Trainer")("starter", args=config, environment_factory=Duel)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", NAMES)
def test_every_trainer_trains_each_part(kind: str, tmp_path: Path) -> None:
    # With a KL, the reference reads each part's own tokens.
    trainer = trained(kind, tmp_path, **({} if kind == "SDPO" else {"beta": 0.01}))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.global_step == 2 and all(math.isfinite(entry["loss"]) for entry in logs)
    assert all("parts/black/reward" in entry for entry in logs)


def test_the_tokens_of_each_part_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    trainer = trained("GRPO", tmp_path, loss_type="grpo", scale_rewards="none")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    # The policy's own log-probs of what was sampled, read from the packed rows, are those of the sampler.
    assert max(entry["sampler_mismatch"] for entry in logs) < 1e-4
    assert max(abs(entry["ratio/max"] - 1) for entry in logs) < 1e-3
    records = list(trainer.episode_log.read())
    assert len([record for record in records if not record["part"]]) == 16
    groups: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for record in records:
        groups[record["position"], record["part"]].append(record)
    assert len(groups) == 8
    taught = 0
    for (_, part), members in groups.items():
        assert len(members) == 4
        mean = sum(record["reward"] for record in members) / 4
        # Each is compared with the same part of its siblings; who earned their mean teaches nothing.
        taught += sum(sum(record["mask"]) for record in members if record["reward"] != mean)
        if part:
            assert {record["messages"][0]["content"].partition(". ")[2] for record in members} == {"You are black."}
    assert taught > 0 and sum(entry["tokens/trained"] for entry in logs) == taught
