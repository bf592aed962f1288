"""Logged episodes become a dataset, and a policy learns to imitate them."""

from __future__ import annotations

import math

import pytest
import torch

from envgrad import ConfigurationError, GRPOConfig, GRPOTrainer
from envgrad.logprobs import policy_logprobs
from envgrad.packing import pack
from envgrad.training.warm_start import _sample, export_episodes, warm_start


class Dial:
    """``turn(to=7)`` earns 1."""

    def reset(self, seed):
        self.seven = False
        return "Turn the dial to 7."

    def turn(self, to: int) -> str:
        """Turn the dial.

        Args:
            to: The number.
        """
        self.seven = to == 7
        return "click"

    def get_reward(self):
        return {"seven": float(self.seven), "tried": 0.25}


def make(folder, **options):
    config = GRPOConfig(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=8, num_generations=4, max_completion_length=32,
        max_turns=2, learning_rate=0.0, disable_tqdm=True, report_to="none", save_strategy="no", **options,
    )  # fmt: skip
    return GRPOTrainer("starter", args=config, environment_factory=Dial)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make(folder).train()
    return folder


def test_the_dataset_holds_every_episode_as_messages_and_exact_tokens(run):
    rows = export_episodes(run)
    assert len(rows) == 16 and set(rows["environment"]) == {"Dial"} and set(rows["step"]) == {0, 1}
    row = rows[0]
    assert [message["role"] for message in row["prompt"]] == ["user"]
    assert row["completion"][0]["role"] == "assistant"
    assert len(row["token_ids"]) == len(row["mask"]) and not any(row["mask"][: row["prompt_length"]])
    called = [row for row in rows if any(message["tool_calls"] for message in row["completion"])]
    assert called and isinstance(called[0]["completion"][0]["tool_calls"][0]["function"]["arguments"], str)


def test_filters_leave_out_what_they_say(run):
    assert len(export_episodes(run, from_step=1)) == 8
    assert all(row["reward"] >= 0.25 for row in export_episodes(run, min_reward=0.25))
    with pytest.raises(ConfigurationError, match=r"min_reward=9"):
        export_episodes(run, min_reward=9.0)
    with pytest.raises(ConfigurationError, match="environment='Other'"):
        export_episodes(run, environment="Other")
    with pytest.raises(ConfigurationError, match="holds no episode log"):
        export_episodes(run / "nowhere")


def test_the_first_loss_is_the_mean_negative_log_likelihood(run, tmp_path):
    trainer = make(tmp_path)
    rows = export_episodes(run)
    samples = [_sample(row, number) for number, row in enumerate(rows)]
    total = tokens = 0
    for sample in samples:
        micro_batch = pack([sample], [1.0]).micro_batches[0]
        with torch.no_grad():
            total -= float(policy_logprobs(trainer.model, micro_batch).logprobs.sum())
        tokens += sample.num_trained_tokens
    result = warm_start(trainer, rows, batch_size=16)
    assert result.episodes == 16 and len(result.losses) == 1
    assert math.isclose(result.losses[0], total / tokens, rel_tol=1e-4)
    trainer.close()


def test_imitation_makes_the_imitated_likelier_and_training_goes_on(run, tmp_path):
    trainer = make(tmp_path)
    result = warm_start(trainer, run, epochs=6, batch_size=8, learning_rate=2e-3)
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert trainer.train().global_step == 2


def test_tokens_of_another_model_are_refused(run, tmp_path):
    trainer = make(tmp_path)
    row = dict(export_episodes(run)[0])
    row["token_ids"] = [*row["token_ids"][:-1], 10**6]
    with pytest.raises(ConfigurationError, match="token id 1000000"):
        warm_start(trainer, [row])
    with pytest.raises(ConfigurationError, match="export_episodes"):
        warm_start(trainer, [{"messages": []}])
    with pytest.raises(ConfigurationError, match="epochs=0"):
        warm_start(trainer, run, epochs=0)
    trainer.close()
