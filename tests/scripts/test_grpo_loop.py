from __future__ import annotations

import pytest
import torch

import grpo_loop
from envgrad import GRPOConfig, GRPOTrainer
from envgrad.starter.compass import Compass


def test_the_library_has_the_losses_and_gradients_of_the_plain_loop(tmp_path):
    config = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=48, num_generations=16, use_cpu=True,
        max_completion_length=256, loss_type="dapo", report_to="none", save_strategy="no", disable_tqdm=True,
        max_grad_norm=0.0, learning_rate=0.0, max_tokens_per_microbatch=900,
    )  # fmt: skip
    trainer = GRPOTrainer("starter", args=config, environment_factory=Compass)
    seen = {}
    step = trainer.training_step

    def keep(model, inputs, *args):
        loss = step(model, inputs, *args)
        seen["loss"], seen["batch"] = float(loss), inputs.batch
        seen["gradient"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return loss

    trainer.training_step = keep
    trainer.train()
    groups: dict[str, list] = {}
    for sample in seen["batch"].samples:
        row = grpo_loop.Row(list(sample.token_ids), list(sample.mask), list(sample.logprobs), sample.episode.reward)
        groups.setdefault(sample.group, []).append(row)
    assert len(groups) == 3 and len(seen["batch"]) > 1
    for group in groups.values():
        grpo_loop.set_advantages(group)
    rows = [row for group in groups.values() for row in group]
    assert any(row.advantage for row in rows)
    trainer.model.zero_grad()
    loss = grpo_loop.policy_loss(trainer.model.eval(), rows)
    loss.backward()
    assert seen["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            difference = (seen["gradient"][name] - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-8)
            assert difference < 1e-4, name


def test_the_plain_loop_runs(capsys):
    rewards = grpo_loop.main(steps=1, groups=1, siblings=2)
    assert len(rewards) == 1 and 0 <= rewards[0] <= 1
    assert "step 1: reward" in capsys.readouterr().out
    assert torch.is_grad_enabled()
