"""What the scripts share: their command line, and a tokenizer whose tool calls both libraries can read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

STARTER_RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<|call|>",
            "close_pattern": r"(?=<\|call\|>)|<\|end\|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}
"""how transformers' ``parse_response`` reads what the starter writes: trl knows templates by their text only"""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name or path of the model")
    parser.add_argument("--output-dir", default="runs/trl-script")
    parser.add_argument("--max-steps", type=int, default=20)
    return parser.parse_args()


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    if "<|call|>" in tokenizer.get_vocab() and tokenizer.response_template is None:
        tokenizer.response_template = STARTER_RESPONSES
    return tokenizer


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings that the scripts share; a model of this size learns with a large step."""
    return {
        "output_dir": arguments.output_dir,
        "max_steps": arguments.max_steps,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }


def save_curve(trainer: Any, output_dir: str) -> None:
    """The logged rewards, step by step, for whoever compares."""
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    Path(output_dir, "rewards.json").write_text(json.dumps(rewards), encoding="utf-8")
