"""Find a hidden number from 1 to 16 in five guesses: higher or lower."""

from __future__ import annotations

import random

from envgrad import GRPOConfig, GRPOTrainer

MAX_GUESSES = 5  # halving the range needs at most five


class GuessNumber:
    def reset(self, seed: int) -> str:
        # All siblings of a group get one seed, and so one hidden number.
        self.hidden = random.Random(seed).randint(1, 16)
        self.guesses = 0
        self.solved = False
        return "Guess my number from 1 to 16."

    def guess(self, number: int) -> str:
        """
        Guess the hidden number.

        Args:
            number: Your guess, from 1 to 16.

        Returns:
            Whether the hidden number is higher or lower.
        """
        self.guesses += 1
        self.solved = number == self.hidden
        return "correct" if self.solved else "higher" if self.hidden > number else "lower"

    @property
    def done(self) -> bool:
        return self.solved or self.guesses >= MAX_GUESSES

    def get_reward(self) -> float:
        return float(self.solved)


def main(output_dir: str = "outputs/guess_number", max_steps: int = 50) -> None:
    args = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=128,  # episodes in a step: 8 groups of 16 siblings
        num_generations=16,
        max_completion_length=128,
        max_turns=6,  # five guesses; the calls of the last turn do not run
        learning_rate=1e-3,
    )
    GRPOTrainer("starter", args=args, environment_factory=GuessNumber).train()


if __name__ == "__main__":
    main()
