"""Runs of self-distillation whose reward must rise."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from envgrad.algorithms.demonstrations import Reprompting
from envgrad.chat.renderer import ChatRenderer
from envgrad.config import SDPOConfig
from envgrad.environments.tools import build_tool
from envgrad.starter import STARTER_PATH
from envgrad.starter.compass import Compass
from envgrad.training.trainers import SDPOTrainer

COLORS = ("red", "green", "blue", "white")


class Favourite:
    """One of four colors pays; the task does not say which."""

    def reset(self) -> str:
        self.done = False
        return "Choose a color."

    def choose(self, color: Literal["red", "green", "blue", "white"]) -> str:
        """
        Choose.

        Args:
            color: Which one.
        """
        self.done, self.paid = True, color == "green"
        return "right" if self.paid else "wrong"

    def get_reward(self) -> float:
        return float(self.done and self.paid)


def config(tmp_path: Path, **changes: Any) -> SDPOConfig:
    options: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_completion_length": 128, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "log_episodes": False, "seed": 0,
    }  # fmt: skip
    return SDPOConfig(**(options | changes))


def rewards(trainer: SDPOTrainer) -> list[float]:
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def reading_starter() -> PreTrainedModel:
    """The starter, taught to do what a demonstration in its prompt does, and to choose at random without one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(STARTER_PATH)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(STARTER_PATH))
    schemas = [build_tool("choose", Favourite().choose).schema]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = {}
    for color in COLORS:
        demonstration = f'choose({{"color": "{color}"}}) -> right'
        told = Reprompting().text("Choose a color.", solution=demonstration, feedback=None)
        call = {"type": "function", "function": {"name": "choose", "arguments": {"color": color}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        for seen in ("Choose a color.", told):
            question = {"role": "user", "content": seen}
            prompt = renderer.render([question], schemas, generation=True)
            whole = renderer.render([question, answer], schemas)
            ids = [renderer.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, whole)]
            assert ids[1][: len(ids[0])] == ids[0]
            rows[color, seen != told] = (torch.tensor([ids[1]]), len(ids[0]))
    for _ in range(60):
        losses = []
        for ids, prompt in rows.values():
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, prompt - 1 :]
            losses.append(cross_entropy(logits, ids[0, prompt:]))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"distillation_mode": "sampled_token"}, {"distillation_mode": "full_logits", "distillation_alpha": 0.5}]
)
def test_a_model_that_reads_demonstrations_needs_no_policy_gradient(tmp_path: Path, how: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    args = config(tmp_path, max_steps=8, per_device_train_batch_size=32, num_generations=16, **how)
    tokenizer = AutoTokenizer.from_pretrained(STARTER_PATH)
    trainer = SDPOTrainer(
        reading_starter(), args=args, environment_factory=Favourite, processing_class=tokenizer
    )  # fmt: skip
    found = rewards(trainer)
    assert found[0] < 0.5 and fmean(found[-3:]) > 0.9


@pytest.mark.slow
def test_the_starter_learns_the_compass_beside_a_policy_gradient(tmp_path: Path) -> None:
    """It plays blindly and makes no use of demonstrations, so that distillation alone would teach it nothing."""
    torch.set_num_threads(1)
    args = config(
        tmp_path, max_steps=40, num_iterations=2, per_device_train_batch_size=128, num_generations=16, max_turns=8,
        adam_beta2=0.99, distillation_weight=0.1, reprompt_template="{prompt}{solution}",
        solution_template=" {successful_previous_attempt}",
    )  # fmt: skip
    found = rewards(SDPOTrainer("starter", args=args, environment_factory=Compass))
    assert fmean(found[:3]) < 0.25 and fmean(found[-5:]) > fmean(found[:3]) + 0.12
