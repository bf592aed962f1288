"""Find a secret three-letter word in six guesses. The environment draws the word from a generator of its own."""

from __future__ import annotations

import itertools
import random

from envgrad import GRPOConfig, GRPOTrainer

LIST = (
    "ant ape arm art bat bed bee bus cat cow cup day dog ear egg eye fan fig fox gem "
    "hat hen ice ink jam key leg lip map net oak owl pen pig rat sea sun tea van zoo"
)
WORDS = LIST.split()
MAX_GUESSES = 6


class Wordle:
    made = itertools.count()  # a seed for each instance: a run that is made again draws the same words

    def __init__(self, seed: int | None = None) -> None:
        self.random = random.Random(next(self.made) if seed is None else seed)

    def reset(self) -> str:
        # It asks for no seed, so siblings cannot be reset alike: one instance is reset, and the others are its copies.
        self.secret = self.random.choice(WORDS)
        self.guesses = 0
        self.solved = False
        return "Guess my word of three letters."

    def guess(self, word: str) -> str:
        """
        Guess the secret word.

        Args:
            word: Your guess, of three letters.

        Returns:
            For each letter whether it is right, elsewhere in the word, or absent.
        """
        if len(word) != 3:
            raise ValueError(f"the word has three letters, not {len(word)}")
        self.guesses += 1
        self.solved = word.lower() == self.secret
        return " ".join(self._mark(letter, secret) for letter, secret in zip(word.lower(), self.secret, strict=True))

    def _mark(self, letter: str, secret: str) -> str:
        return "right" if letter == secret else "elsewhere" if letter in self.secret else "absent"

    @property
    def done(self) -> bool:
        return self.solved or self.guesses >= MAX_GUESSES

    def get_reward(self) -> float:
        return float(self.solved)


def main(output_dir: str = "outputs/wordle", max_steps: int = 50) -> None:
    args = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=128,
        num_generations=16,
        learning_rate=1e-3,
    )
    GRPOTrainer("starter", args=args, environment_factory=Wordle).train()


if __name__ == "__main__":
    main()
