"""Agents that own their loop are trained like any environment: same tokens, ratio 1, every trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import envgrad
from envgrad import ConfigurationError
from envgrad.agents import AgentEndpoint
from envgrad.config.evaluation import EvalConfig
from envgrad.episodes.log import EpisodeLog
from envgrad.starter.compass import Compass
from envgrad.training.evaluation import eval_tasks, local_rollouts, play_evaluation
from envgrad.training.inputs import UserInputs
from envgrad.types import Episode
from helpers.agents import CompassAgent, StreamingCompassAgent, client_of
from helpers.trainers import NAMES


def played(factory: Any, tmp_path: Path, **changes: Any) -> list[Episode]:
    options = {"num_generations_eval": 4, "use_cpu": True, "max_completion_length": 96, "temperature": 1.0}
    config = EvalConfig(output_dir=str(tmp_path), **(options | changes))
    rollouts = local_rollouts("starter", config, UserInputs(environment_factory={"game": factory}))
    found = play_evaluation(rollouts, eval_tasks(rollouts, "eval", 3))
    return [episode for group in found.groups for episode in group.episodes]


@pytest.mark.parametrize("agent", [CompassAgent, StreamingCompassAgent])
def test_an_agent_that_does_what_the_loop_does_has_the_loops_tokens(agent: Any, tmp_path: Path) -> None:
    ours, theirs = played(Compass, tmp_path), played(agent, tmp_path)
    assert len(ours) == len(theirs) == 12
    assert max(len(episode.turns) for episode in ours) > 2
    for one, other in zip(ours, theirs, strict=True):
        assert one.task.seed == other.task.seed
        assert one.token_ids == other.token_ids
        assert one.mask == other.mask and one.prompt_length == other.prompt_length
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.reward == other.reward
        assert len(one.turns) == len(other.turns) and not other.branches


class TwoChats(CompassAgent):
    """Asks a second chat what it thinks of the game: a row of its own in every episode."""

    async def run_agent(self, endpoint: AgentEndpoint) -> None:
        await super().run_agent(endpoint)
        async with client_of(endpoint) as client:
            await self.ask(client, [{"role": "user", "content": "Which way is best?"}])


def trained(kind: str, factory: Any, tmp_path: Path, **options: Any) -> Any:
    made: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 192, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "log_episodes": True,
    }  # fmt: skip
    config = getattr(envgrad, f"{kind}Config")(**(made | options))
    trainer = getattr(envgrad, f"{kind}Trainer")("starter", args=config, environment_factory=factory)
    trainer.train()
    return trainer


def test_five_steps_of_grpo_through_an_agent_have_ratio_1(tmp_path: Path) -> None:
    trainer = trained("GRPO", TwoChats, tmp_path, max_steps=5)
    history = trainer.state.log_history
    ratios = [entry["ratio/max"] for entry in history if "ratio/max" in entry]
    mismatch = [entry["sampler_mismatch"] for entry in history if "sampler_mismatch" in entry]
    assert ratios and max(abs(ratio - 1) for ratio in ratios) < 1e-4 and max(mismatch) < 1e-4
    records = list(EpisodeLog(tmp_path / "episodes").read())
    assert len(records) == 5 * 8 and all(len(record["branches"]) == 1 for record in records)
    # the main row is that of the last answer: the second chat's
    assert {record["messages"][0]["content"] for record in records} == {"Which way is best?"}
    tokens = sum(sum(record["mask"]) + sum(record["branches"][0]["mask"]) for record in records)
    assert tokens == pytest.approx(sum(entry.get("tokens/sampled", 0.0) for entry in history))


@pytest.mark.parametrize("kind", NAMES)
def test_agents_train_in_every_trainer(kind: str, tmp_path: Path) -> None:
    trainer = trained(kind, TwoChats, tmp_path, num_generations=2, per_device_train_batch_size=4)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.global_step == 2 and all(math.isfinite(loss) for loss in losses)


def test_agents_and_other_environments_mix(tmp_path: Path) -> None:
    factories = {"alone": Compass, "agent": CompassAgent}
    trainer = trained("GRPO", factories, tmp_path, per_device_train_batch_size=16)
    environments = {record["environment"] for record in EpisodeLog(tmp_path / "episodes").read()}
    assert environments == {"alone", "agent"} and trainer.state.global_step == 2


def test_what_cannot_be_promised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="deterministic=True cannot be promised for CompassAgent"):
        trained("GRPO", CompassAgent, tmp_path, deterministic=True)
