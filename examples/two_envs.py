"""One agent, two environments, each with its own tools. Three tasks of four come from the first."""

from __future__ import annotations

from guess_number import GuessNumber

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.starter.compass import Compass


def main(output_dir: str = "outputs/two_envs", max_steps: int = 60) -> None:
    args = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=256,
        num_generations=16,
        max_completion_length=128,
        learning_rate=1e-3,
        environment_weights={"compass": 3, "guess_number": 1},
    )
    factories = {"compass": Compass, "guess_number": GuessNumber}
    GRPOTrainer("starter", args=args, environment_factory=factories).train()


if __name__ == "__main__":
    main()
