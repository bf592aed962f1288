"""Five steps of GRPO with the starter model on an environment of each ecosystem, and on a mixture."""

from __future__ import annotations

import math
from collections import Counter

import pytest

pytest.importorskip("torch")

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.environments.adapters.gymnasium import GymnasiumEnvironment
from envgrad.environments.adapters.reasoning_gym import ReasoningGymEnvironment
from envgrad.environments.adapters.textarena import TextArenaEnvironment


def lake():
    pytest.importorskip("gymnasium")
    return GymnasiumEnvironment("FrozenLake-v1", prompt="Go.", is_slippery=False)


def sums():
    pytest.importorskip("reasoning_gym")
    return ReasoningGymEnvironment("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, system_prompt="")


def guess():
    pytest.importorskip("textarena")
    return TextArenaEnvironment("GuessTheNumber-v0")


def cross():
    pytest.importorskip("textarena")
    return TextArenaEnvironment("TicTacToe-v0", opponents="self", move_tokens=6)


def train(folder, factory, **changes):
    options = {
        "output_dir": str(folder), "max_steps": 5, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 160, "max_turn_tokens": 12, "max_turns": 3, "report_to": "none", "use_cpu": True,
        "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    trainer = GRPOTrainer("starter", args=GRPOConfig(**(options | changes)), environment_factory=factory)
    trainer.train()
    return trainer


@pytest.mark.parametrize("make", [lake, sums, guess, cross])
def test_five_steps(make, tmp_path):
    changes = {"max_completion_length": 640, "max_turns": 4} if make is cross else {}  # games that end
    trainer = train(tmp_path, make(), **changes)
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.state.global_step == 5 and len(logs) == 5
    assert all(math.isfinite(entry["reward"]) for entry in logs)
    assert not any(entry.get("group/start_mismatch") for entry in logs)
    records = list(trainer.episode_log.read())
    assert len(records) == 40 and all(record["reward"] is not None for record in records)


def test_a_mixture_of_two_ecosystems(tmp_path):
    factories = {"lake": lake(), "sums": sums()}
    trainer = train(tmp_path, factories, environment_weights={"lake": 0.4, "sums": 0.6})
    assert trainer.state.global_step == 5
    records = list(trainer.episode_log.read())
    assert Counter(record["environment"] for record in records) == {"lake": 16, "sums": 24}
