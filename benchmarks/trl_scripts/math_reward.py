"""A dataset of questions, and two reward functions: is the answer a number, and is it right?"""

from __future__ import annotations

import re

from common import load_tokenizer, options, read_arguments, save_curve
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def questions() -> Dataset:
    pairs = [(a, b) for a in range(5) for b in range(5) if a + b < 5]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"{a} + {b} ="}] for a, b in pairs],
            "solution": [str(a + b) for a, b in pairs],
        }
    )


def number_reward(completions, **kwargs):
    return [1.0 if re.fullmatch(r"\s*\d+\s*", answer[0]["content"]) else 0.0 for answer in completions]


def correct_reward(completions, solution, **kwargs):
    return [
        1.0 if answer[0]["content"].strip() == right else 0.0
        for answer, right in zip(completions, solution, strict=True)
    ]


if __name__ == "__main__":
    arguments = read_arguments()
    trainer = GRPOTrainer(
        model=arguments.model,
        args=GRPOConfig(**options(arguments), max_completion_length=8, beta=0.0, reward_weights=[0.5, 1.0]),
        reward_funcs=[number_reward, correct_reward],
        train_dataset=questions(),
        processing_class=load_tokenizer(arguments.model),
    )
    trainer.train()
    save_curve(trainer, arguments.output_dir)
