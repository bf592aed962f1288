"""Train the model that ships with envgrad on an environment alone, and hold it against what needs no learning.

The environment is :class:`envgrad.starter.compass.Compass`: a 4x4 grid, an unseen goal, six moves, and replies that say
where the goal lies. Run it::

    python examples/compass.py
"""

from __future__ import annotations

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.starter.compass import Compass, baselines


def main(output_dir: str = "outputs/compass", max_steps: int = 60) -> None:
    args = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=256,  # episodes in a step: 16 groups of 16 siblings
        num_generations=16,
        max_completion_length=128,
        max_turns=8,
        temperature=1.0,
        learning_rate=1e-3,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        report_to="none",
    )
    GRPOTrainer("starter", args=args, environment_factory=Compass).train()

    found = baselines(range(200))
    print("success without reading a reply, on 200 tasks:")
    print(f"  always the same way     {found.constant:.2f}")
    print(f"  random moves            {found.random:.2f}")
    print(f"  best sequence of moves  {found.reply_blind:.2f}  (chosen with hindsight)")


if __name__ == "__main__":
    main()
