"""A game as an environment: its methods are the agent's tools, it owns the reward, and rows feed its ``reset``."""

from __future__ import annotations

from common import load_tokenizer, options, read_arguments, save_curve
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class HigherLower:
    def reset(self, hidden, **kwargs):
        self.hidden, self.guesses, self.solved = hidden, 0, False
        return "Guess my number, from 1 to 16."

    def guess(self, number: int) -> str:
        """
        Guess the hidden number.

        Args:
            number: Your guess, from 1 to 16.

        Returns:
            Whether the hidden number is higher or lower.
        """
        self.guesses += 1
        self.solved = self.solved or number == self.hidden
        return "correct" if number == self.hidden else "higher" if self.hidden > number else "lower"

    def get_reward(self) -> float:
        return float(self.solved)


def played_reward(environments, **kwargs):
    """A little for guessing at all."""
    return [0.2 * min(environment.guesses, 3) / 3 for environment in environments]


if __name__ == "__main__":
    arguments = read_arguments()
    trainer = GRPOTrainer(
        model=arguments.model,
        args=GRPOConfig(**options(arguments), max_completion_length=96, max_tool_calling_iterations=3),
        reward_funcs=played_reward,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": ""}]] * 16, "hidden": list(range(1, 17))}
        ),
        processing_class=load_tokenizer(arguments.model),
        environment_factory=HigherLower,
    )
    trainer.train()
    save_curve(trainer, arguments.output_dir)
