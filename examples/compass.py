"""Train the model that ships with envgrad on an environment alone, and hold it against what needs no reading.

The environment is :class:`envgrad.starter.compass.Compass`: a 4x4 grid, an unseen goal, six moves, and replies that say
where the goal lies.
"""

from __future__ import annotations

from statistics import mean

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.starter.compass import Compass, baselines


def main(output_dir: str = "outputs/compass", max_steps: int = 80) -> None:
    args = GRPOConfig(
        output_dir=output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=256,  # episodes in a step: 16 groups of 16 siblings
        num_generations=16,
        max_completion_length=160,
        max_turns=7,  # six moves; the calls of the last turn do not run
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        eval_tasks=200,
        logging_steps=1,
    )
    trainer = GRPOTrainer("starter", args=args, environment_factory=Compass)
    trainer.train()

    # Tasks that training never drew.
    groups = trainer.play_eval().groups
    blind = baselines(group.task.seed for group in groups)
    success = mean(episode.reward or 0.0 for group in groups for episode in group.episodes)
    print(f"success on {len(groups)} new tasks")
    print(f"  the trained agent       {success:.2f}")
    print(f"  always the same way     {blind.constant:.2f}")
    print(f"  random moves            {blind.random:.2f}")
    print(f"  best sequence of moves  {blind.reply_blind:.2f}  (chosen with hindsight)")


if __name__ == "__main__":
    main()
