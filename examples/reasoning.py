"""Small sums from reasoning-gym, whose datasets draw, ask and score. Needs: pip install reasoning-gym."""

from __future__ import annotations

import argparse

from envgrad import ConfigurationError, GRPOConfig, GRPOTrainer
from envgrad.environments.contract import StepResult

try:
    import reasoning_gym
except ImportError as error:
    raise ConfigurationError("this example needs reasoning-gym: pip install reasoning-gym") from error


class Sums:
    def reset(self, seed: int) -> list[dict[str, str]]:
        self.dataset = reasoning_gym.create_dataset(
            "chain_sum", seed=seed % 2**31, size=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
        self.entry = self.dataset[0]
        return [
            {"role": "system", "content": "Answer with the number and nothing else."},
            {"role": "user", "content": self.entry["question"]},
        ]

    def step(self, message: str) -> StepResult:
        # 1 for the bare answer; an answer with words around it earns its share of the letters.
        return StepResult("", reward=self.dataset.score_answer(message.strip(), self.entry), done=True)


def main(model: str = "starter", output_dir: str = "outputs/reasoning", max_steps: int = 20) -> None:
    args = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=32,  # episodes in a step: 4 groups of 8 siblings
        num_generations=8,
        max_completion_length=32,
        learning_rate=1e-5,
        logging_steps=1,
    )
    GRPOTrainer(model, args=args, environment_factory=Sums).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--max-steps", type=int, default=20)
    options = parser.parse_args()
    main(model=options.model, max_steps=options.max_steps)
