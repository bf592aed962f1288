"""A complete GRPO without abstractions: one file, read from top to bottom, that trains the starter model on Compass.

    python scripts/grpo_loop.py --steps 30

Everything is plain and slow: one episode after the other, no key-value cache, one row per forward. The library does the
same faster; a test holds its losses to these. What is borrowed from it is the environment, the chat renderer (so that
sampled ids are trained as they were sampled) and the check of a tool call's arguments.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch

from envgrad.chat.renderer import ChatRenderer
from envgrad.environments.contract import inspect_environment
from envgrad.environments.tools import check_arguments, find_tool
from envgrad.errors import ToolCallError
from envgrad.starter import load_starter
from envgrad.starter.compass import Compass

GROUPS, SIBLINGS, MAX_TURNS, MAX_TURN_TOKENS = 8, 8, 6, 32
LEARNING_RATE, EPSILON = 1e-3, 0.2


@dataclass
class Row:
    """One episode: token ids, 1 where sampled, the log-prob it was sampled with, and the episode's reward."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float = 0.0
    advantage: float = field(default=0.0)


def logprobs_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probs of ``ids[1:]``, each given those before it. Shape (len(ids) - 1,)."""
    row = torch.tensor([ids])
    logits = model(input_ids=row[:, :-1]).logits[0].float()
    return torch.log_softmax(logits, dim=-1).gather(1, row[0, 1:, None])[:, 0]


@torch.no_grad()
def sample(model: torch.nn.Module, ids: list[int], stop: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """One answer to ``ids`` at temperature 1, with the log-prob of each token. A sampled stop token is kept."""
    sampled: list[int] = []
    logprobs: list[float] = []
    while len(sampled) < MAX_TURN_TOKENS and (not sampled or sampled[-1] not in stop):
        logits = model(input_ids=torch.tensor([ids + sampled])).logits[0, -1].float()
        token = int(torch.multinomial(torch.softmax(logits, dim=-1), 1))
        sampled.append(token)
        logprobs.append(float(torch.log_softmax(logits, dim=-1)[token]))
    return sampled, logprobs


def play(model: torch.nn.Module, renderer: ChatRenderer, seed: int) -> Row:
    """One episode of the task that ``seed`` draws."""
    spec, environment = inspect_environment("compass", Compass)
    schemas = [tool.schema for tool in spec.tools]
    prompt = renderer.open([{"role": "user", "content": environment.reset(seed=seed)}], schemas)
    row = Row(ids=prompt, mask=[0] * len(prompt), logprobs=[0.0] * len(prompt))
    for turn in range(MAX_TURNS):
        sampled, logprobs = sample(model, row.ids, renderer.stop_token_ids)
        row.ids += sampled
        row.mask += [1] * len(sampled)
        row.logprobs += logprobs
        answer = renderer.read(sampled, schemas, turn=turn)
        if not answer.calls or sampled[-1] not in renderer.stop_token_ids:
            break
        results = []
        for call in answer.calls:
            try:
                tool = find_tool(call.name, spec.tools)
                content = str(tool.bind(environment)(**check_arguments(tool, call.arguments)))
            except ToolCallError as error:
                content = str(error)
            results.append({"role": "tool", "tool_call_id": call.id, "name": call.name or "", "content": content})
        if environment.done:
            break
        suffix = renderer.suffix(sampled, results, schemas)
        row.ids += suffix
        row.mask += [0] * len(suffix)
        row.logprobs += [0.0] * len(suffix)
    row.reward = float(environment.get_reward())
    return row


def set_advantages(group: list[Row]) -> None:
    """(reward - mean of the group) / (its standard deviation + 1e-4); 0 where all siblings earned the same."""
    rewards = torch.tensor([row.reward for row in group])
    for row in group:
        spread = rewards.std()
        row.advantage = 0.0 if spread == 0 else float((row.reward - rewards.mean()) / (spread + 1e-4))


def policy_loss(model: torch.nn.Module, rows: list[Row]) -> torch.Tensor:
    """The clipped surrogate, averaged over all sampled tokens of the step."""
    total = sum(sum(row.mask) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        mask = torch.tensor(row.mask[1:], dtype=torch.bool)
        ratio = (logprobs_of(model, row.ids)[mask] - torch.tensor(row.logprobs[1:])[mask]).exp()
        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
        loss = loss - torch.minimum(ratio * row.advantage, clipped * row.advantage).sum() / total
    return loss


def main(steps: int, groups: int = GROUPS, siblings: int = SIBLINGS) -> list[float]:
    torch.manual_seed(0)
    model, tokenizer = load_starter()
    renderer = ChatRenderer(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    rewards: list[float] = []
    for step in range(steps):
        rows: list[Row] = []
        for number in range(groups):
            group = [play(model, renderer, seed=step * groups + number) for _ in range(siblings)]
            set_advantages(group)
            rows += group
        loss = policy_loss(model, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rewards.append(sum(row.reward for row in rows) / len(rows))
        print(f"step {step + 1}: reward {rewards[-1]:.2f}, loss {loss.item():+.4f}", flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    main(parser.parse_args().steps)
