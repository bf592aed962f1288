"""An agent with a tool: it is paid for how near the tool's result is to what the request asks for."""

from __future__ import annotations

from common import load_tokenizer, options, read_arguments, save_curve
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def move(number: int) -> str:
    """
    Move the dial of the heating.

    Args:
        number: Where to, from 1 to 16.

    Returns:
        Where the dial stands.
    """
    if not 1 <= number <= 16:
        raise ValueError("number must be from 1 to 16")
    return str(number)


def requests() -> Dataset:
    words = ("freezing", "icy", "cold", "cool", "mild", "warm", "hot", "boiling")
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"Make the room {word}."}] for word in words],
            "wanted": [2 * (index + 1) for index in range(len(words))],
        }
    )


def near_reward(completions, wanted, **kwargs):
    rewards = []
    for messages, number in zip(completions, wanted, strict=True):
        results = [message["content"] for message in messages if message["role"] == "tool"]
        last = results[-1] if results and results[-1].isdigit() else None
        rewards.append(0.0 if last is None else 1.0 - abs(int(last) - number) / 15)
    return rewards


if __name__ == "__main__":
    arguments = read_arguments()
    trainer = GRPOTrainer(
        model=arguments.model,
        args=GRPOConfig(**options(arguments), max_completion_length=48, max_tool_calling_iterations=1),
        reward_funcs=near_reward,
        train_dataset=requests(),
        processing_class=load_tokenizer(arguments.model),
        tools=[move],
    )
    trainer.train()
    save_curve(trainer, arguments.output_dir)
