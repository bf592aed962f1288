"""``load_best_model_at_end`` by our own evaluations, on every trainer."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

from envgrad import GRPOTrainer
from envgrad.errors import ConfigurationError
from helpers.models import Constant, Letters, config, flat, tiny_llama, tokenizer_of
from helpers.trainers import NAMES, Kind

BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1,
        "eval_steps": 1, "eval_tasks": 2}  # fmt: skip


class Keep(TrainerCallback):
    """Keeps the weights behind each step."""

    def __init__(self):
        self.weights = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights[state.global_step] = flat(model)


def with_rewards(trainer, rewards, name="eval_reward"):
    """Let the trainer's evaluations say these rewards, one after the other."""
    said, evaluate = iter(rewards), trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: evaluate(*args, **kwargs) | {name: next(said)}
    return trainer


def make(folder, *, peft_config=None, callbacks=(), environment=Letters, eval_dataset=None, **changes):
    return GRPOTrainer(
        tiny_llama(), args=config(folder, **(BEST | {"max_steps": 4} | changes)), processing_class=tokenizer_of(),
        environment_factory=environment, peft_config=peft_config, callbacks=list(callbacks), eval_dataset=eval_dataset,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_trainer_ends_with_its_best_weights_and_keeps_their_checkpoint(tmp_path, name):
    keep = Keep()
    options = BEST | {"max_steps": 4, "save_total_limit": 2, "metric_for_best_model": "eval/reward"}
    trainer = Kind(name).make(tmp_path, tiny_llama(), environment_factory=Letters, callbacks=[keep], options=options)
    evaluate = trainer.evaluate
    with_rewards(trainer, [0.1, 0.9, 0.2, 0.3]).train()
    assert trainer.state.best_metric == 0.9 and trainer.state.best_global_step == 2
    assert torch.equal(flat(trainer.model), keep.weights[2])
    assert name == "SDPO" or not torch.equal(keep.weights[2], keep.weights[4])
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    trainer.evaluate = evaluate
    again = trainer.evaluate()["eval_reward"]
    measured = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert again == pytest.approx(measured[1], abs=1e-6), "what samples now are the best weights, not the last"


def test_the_best_adapters_are_loaded_and_can_be_trained_further(tmp_path):
    peft = pytest.importorskip("peft")
    keep = Keep()
    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = make(tmp_path, peft_config=lora, callbacks=[keep], save_total_limit=1, metric_for_best_model="reward")
    evaluate = trainer.evaluate
    with_rewards(trainer, [0.1, 0.9, 0.2, 0.3]).train()
    assert torch.equal(flat(trainer.model), keep.weights[2]) and not torch.equal(keep.weights[2], keep.weights[4])
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    trainer.evaluate = evaluate
    measured = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert trainer.evaluate()["eval_reward"] == pytest.approx(measured[1], abs=1e-6)
    assert any(one.requires_grad for one in trainer.model.parameters())


@pytest.mark.parametrize("given", ["eval/reward", "eval_reward", "reward", None, "eval_rewards/Letters/mean"])
def test_names_of_trackers_of_evaluate_and_of_trl_mean_the_same(tmp_path, given):
    trainer = make(tmp_path, metric_for_best_model=given)
    expected = given if given and "rewards" in given else "eval_reward"
    assert trainer.args.metric_for_best_model == expected and trainer.args.greater_is_better is True
    trainer.close()


@pytest.mark.parametrize(("given", "greater"), [
    ("eval/reward", True), ("eval_pass@1", True), ("eval_failures/total", False), ("eval_time/rollout", False),
    ("eval_completions/clipped_ratio", False), ("frac_reward_zero_std", False),
])  # fmt: skip
def test_whether_higher_is_better_follows_from_the_metric_unless_it_is_given(tmp_path, given, greater):
    assert config(tmp_path, **BEST, metric_for_best_model=given).greater_is_better is greater
    assert config(tmp_path, **BEST, metric_for_best_model=given, greater_is_better=not greater).greater_is_better is (
        not greater
    )


def test_where_lower_is_better_the_least_is_the_best(tmp_path):
    trainer = make(tmp_path, metric_for_best_model="eval/failures/total", max_steps=3)
    with_rewards(trainer, [3.0, 1.0, 2.0], name="eval_failures/total").train()
    assert trainer.state.best_global_step == 2


def test_a_misspelt_metric_is_an_error_at_construction_with_those_there_are(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"'eval_rewrad' is no metric .* did you mean 'eval_reward'\? They have"
    ):
        make(tmp_path, metric_for_best_model="eval/rewrad")
    with pytest.raises(ConfigurationError, match=r"did you mean 'eval_reward/[ab]'"):
        make(tmp_path, metric_for_best_model="reward/x", environment={"a": Letters, "b": Constant})
    with pytest.raises(ConfigurationError, match=r"eval_first_reward, eval_second_reward"):
        rows = [{"prompt": "x"}]
        make(tmp_path, eval_dataset={"first": rows, "second": rows})
    make(tmp_path, metric_for_best_model="second_reward", eval_dataset={"first": rows, "second": rows}).close()


def test_a_metric_that_no_evaluation_logs_ends_the_run_with_a_checkpoint_and_the_names(tmp_path):
    trainer = make(tmp_path, metric_for_best_model="eval_rewards/other/mean", save_steps=2, eval_steps=2)
    with pytest.raises(ConfigurationError, match=r"'eval_rewards/other/mean' is no metric .* eval_rew"):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()


def test_the_best_of_a_resumed_run_may_lie_before_the_checkpoint(tmp_path):
    keep = Keep()
    with_rewards(make(tmp_path, max_steps=2, callbacks=[keep]), [0.9, 0.1]).train()
    trainer = with_rewards(make(tmp_path, max_steps=4), [0.2, 0.3])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.best_global_step == 1 and torch.equal(flat(trainer.model), keep.weights[1])


def test_the_card_says_which_weights_these_are_and_how_they_did(tmp_path):
    trainer = with_rewards(make(tmp_path, max_steps=2), [0.9, 0.1])
    trainer.train()
    words = (tmp_path / "README.md").read_text()
    assert "those of step 1, the best by eval\\_reward \\(0.9\\)" in words
    first, last = (entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry)
    assert first != last and f"| eval\\_reward | {first:.6g} |" in words, "figures of these weights"
