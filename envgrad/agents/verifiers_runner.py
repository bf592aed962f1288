"""Plays tasks of a verifiers taskset against an OpenAI-compatible endpoint. Run by the Python that has verifiers.

A program of its own, which needs nothing of the library, since verifiers' requirements and others' do not fit into one
environment. The last line of stdout is JSON::

    python verifiers_runner.py count --taskset gsm8k-v1            {"tasks": 1319}
    python verifiers_runner.py play --taskset gsm8k-v1 --index 3   {"reward": 1.0, "errors": []}

``play`` reads ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``. ``--config`` is the environment's
configuration as JSON, as verifiers reads it under ``env``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["count", "play"])
    parser.add_argument("--taskset", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={})
    given = parser.parse_args()
    vf: Any = importlib.import_module("verifiers.v1")
    config = dict(given.config)
    config["taskset"] = {**config.get("taskset", {}), "id": given.taskset}
    if "id" not in config:  # the environment of one agent, which then runs on this machine if nothing else is said
        config["agent"] = {"runtime": {"type": "subprocess"}, **config.get("agent", {})}
    environment = vf.load_environment(vf.resolve_env_config(config))
    if given.what == "count":
        if not environment.taskset.bounded:
            raise SystemExit(f"taskset {given.taskset} is infinite: bound it with 'take' in a taskset of your own")
        print(json.dumps({"tasks": sum(1 for _ in environment.taskset)}))
        return
    print(json.dumps(asyncio.run(play(vf, environment, given.index))))


async def play(vf: Any, environment: Any, index: int) -> dict[str, Any]:
    """One episode of task ``index``; its reward is the mean over its trainable traces'."""
    task = next((task for number, task in enumerate(environment.taskset) if number == index), None)
    if task is None:
        raise SystemExit(f"the taskset has no task {index}")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(model=os.environ.get("OPENAI_MODEL", "policy"), client=client)
    async with environment.serving():
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return {
        "reward": sum(rewards) / len(rewards) if rewards and episode.ok else None,
        "errors": [f"{error.type}: {error.message}" for error in errors],
    }


if __name__ == "__main__":
    main()
