"""Runs with an episode log that no model has played: as large as a test asks for, the same every time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from envgrad.episodes.flat import Credit
from envgrad.episodes.log import EpisodeLog
from envgrad.errors import EnvironmentFailure
from envgrad.rollout.runner import Round
from envgrad.types import (
    Episode,
    EpisodeRow,
    FailedEpisode,
    Group,
    Message,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Turn,
)

SIBLINGS = 8
WORDS = [
    *("north", "south", "east", "west", "wall", "door", "key", "lamp", "river", "stone", "tower", "bridge", "market"),
    *("forest", "island", "harbour"),
]
ENVIRONMENTS = ("compass", "numbers", "chess")
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Go one step.",
        "parameters": {"type": "object", "properties": {"direction": {"type": "string"}}, "required": ["direction"]},
    },
}


def make_run(
    folder: Path,
    episodes: int = 400,
    *,
    round_episodes: int = 64,
    environments: Sequence[str] = ENVIRONMENTS,
    seed: int = 0,
    eval_every: int = 4,
    hostile: str | None = None,
    tokens: int = 16,
) -> Path:
    """A run in ``folder`` with about ``episodes`` episodes: rounds of ``round_episodes``, a step each; returns it.

    Rewards rise with the steps. Of compass and numbers tools are called, chess is played in free text. Some fail, some
    are truncated, filtered, dropped or unscored, one in 50 has two token rows; every ``eval_every`` steps there is an
    evaluation. ``hostile`` is put into the first episode's prompt, answer and tool result. Answers have ``tokens``
    tokens.
    """
    rng = random.Random(seed)
    log = EpisodeLog(folder / "episodes")
    position = step = made = evaluated = 0
    steps = max(1, -(-episodes // round_episodes))
    while made < episodes:
        groups = []
        for _ in range(max(1, min(round_episodes, episodes - made) // SIBLINGS)):
            skill = step / steps
            text = hostile if position == 0 else None
            groups.append(make_group(rng, position, environments[position % len(environments)], skill, text, tokens))
            position += 1
        played = _sorted_out(rng, groups)
        log.write(played, step=step, credit=partial(make_credit, random.Random(step), played.groups))
        made += sum(len(group.episodes) + len(group.failures) for group in groups)
        rewards = [reward for group in groups for reward in group.scored_rewards]
        mean = sum(rewards) / max(1, len(rewards))
        log.metrics(step + 1, {"loss": rng.gauss(0, 0.01), "reward": mean, "kl": 0.01 * step, "learning_rate": 1e-3})
        if eval_every and step % eval_every == eval_every - 1:
            shown = [
                make_group(rng, evaluated + index, environments[index % len(environments)], step / steps, None, tokens,
                           split="eval", siblings=2)
                for index in range(4)
            ]  # fmt: skip
            log.write(Round(groups=tuple(shown)), step=step + 1)
            log.metrics(step + 1, {"eval_reward": mean})
        step += 1
    log.close()
    return folder


def _sorted_out(rng: random.Random, groups: Sequence[Group]) -> Round:
    kept, filtered, dropped, stale = [], [], [], []
    for group in groups:
        place = rng.random()
        chosen = filtered if place < 0.05 else dropped if place < 0.08 else stale if place < 0.1 else kept
        chosen.append(group)
    return Round(groups=tuple(kept), filtered=tuple(filtered), dropped=tuple(dropped), stale=tuple(stale))


def make_credit(rng: random.Random, groups: Sequence[Group]) -> Credit:
    """Advantages over the group's mean, and a trainer's log-probs near the sampler's."""
    advantages, logprobs = {}, {}
    for group in groups:
        scored = group.scored_rewards
        mean = sum(scored) / max(1, len(scored))
        for episode in group.episodes:
            for number, row in enumerate(episode.rows):
                key = (*episode.key, number)
                advantage = (episode.reward or 0.0) - mean
                advantages[key] = tuple(advantage if sampled else 0.0 for sampled in row.mask)
                logprobs[key] = tuple(
                    value + rng.gauss(0, 0.05) for value, sampled in zip(row.logprobs, row.mask, strict=True) if sampled
                )
    return Credit(advantages=advantages, trainer_logprobs=logprobs)


def make_group(
    rng: random.Random,
    position: int,
    environment: str,
    skill: float = 0.5,
    hostile: str | None = None,
    tokens: int = 16,
    *,
    split: str = "train",
    siblings: int = SIBLINGS,
) -> Group:
    """A group of ``siblings`` episodes, about one in 40 of them failed."""
    task = Task(
        position=position,
        split=split,
        environment=environment,
        group_id=rng.getrandbits(62),
        seed=rng.getrandbits(62),
        task_index=position % 50 if environment == "chess" else None,
        row={"question": f"row {position}", "answer": position} if environment == "chess" else None,
    )
    made, failed = [], []
    for sibling in range(siblings):
        if rng.random() < 0.025:
            cause = ConnectionError("the browser crashed")
            error = EnvironmentFailure(f"{environment}.move raised ConnectionError: {cause}")
            error.__cause__ = cause
            failed.append(FailedEpisode(task=task, sibling=sibling, attempts=3, kind=error.kind, error=error))
        else:
            made.append(_episode(rng, task, sibling, skill, hostile if sibling == 0 else None, tokens))
    return Group(task=task, episodes=tuple(made), failures=tuple(failed))


def _episode(rng: random.Random, task: Task, sibling: int, skill: float, hostile: str | None, tokens: int) -> Episode:
    opening: list[Message] = [
        {"role": "system", "content": "You walk through a town. Answer with a tool call."},
        {"role": "user", "content": f"Task {task.position}: find the {rng.choice(WORDS)}. {hostile or ''}"},
    ]
    messages, turns = list(opening), []
    row = _Row(rng, 12)
    won = rng.random() < 0.2 + 0.7 * skill
    for index in range(rng.randint(1, 4)):
        start = len(row.ids)
        row.add(tokens, sampled=True)
        turn, results = _turn(rng, task, index, start, tokens, hostile)
        messages += [turn.message, *results]
        turns.append(turn)
        row.add(4, sampled=False)
    reward = None if rng.random() < 0.01 else float(won) + 0.1 * len(turns)
    branches = (_Row(rng, 6).add(8, sampled=True).frozen(),) if rng.random() < 0.02 else ()
    reason = rng.choice([StopReason.DONE] * 6 + [StopReason.ANSWER, StopReason.MAX_TURNS, StopReason.EPISODE_TIMEOUT])
    whole = row.frozen()
    return Episode(
        task=task,
        sibling=sibling,
        attempt=int(rng.random() < 0.02),
        token_ids=whole.token_ids,
        mask=whole.mask,
        logprobs=whole.logprobs,
        versions=whole.versions,
        prompt_length=whole.prompt_length,
        messages=tuple(messages),
        turns=tuple(turns),
        stop_reason=reason,
        reward=reward,
        rewards={task.environment: reward and float(won), "turns": 0.1 * len(turns)},
        seconds={"reset": 0.01, "sample": rng.random(), "tools": rng.random() / 10, "reward": 0.001},
        tools=() if task.environment == "chess" else (_SCHEMA,),
        extras={"note": "seen"} if sibling == 0 else {},
        branches=branches,
    )


def _turn(
    rng: random.Random, task: Task, index: int, start: int, tokens: int, hostile: str | None
) -> tuple[Turn, list[Message]]:
    said = " ".join(rng.choices(WORDS, k=tokens // 2)) + (f" {hostile}" if hostile else "")
    seen = "You see a " + " and a ".join(rng.choices(WORDS, k=3)) + (f" {hostile}" if hostile else "")
    facts = {"start": start, "num_tokens": tokens, "policy_version": index, "sample_seconds": 0.1, "tool_seconds": 0.01}
    if task.environment == "chess":
        message: Message = {"role": "assistant", "content": said}
        return Turn(message=message, text=said, observation=seen, **facts), [{"role": "user", "content": seen}]
    call = ToolCall(id=f"call_{index}", name="move", arguments={"direction": rng.choice(WORDS[:4])})
    function = {"name": call.name, "arguments": call.arguments}
    message = {
        "role": "assistant",
        "content": said,
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    outcome = ToolOutcome(call=call, content=seen, ok=rng.random() > 0.05, reward=0.1, seconds=0.01, tool="move")
    result: Message = {"role": "tool", "tool_call_id": call.id, "name": "move", "content": seen}
    return Turn(message=message, text=said, outcomes=(outcome,), reward=0.1, **facts), [result]


class _Row:
    def __init__(self, rng: random.Random, prompt: int) -> None:
        self.rng = rng
        self.ids = [rng.randrange(300) for _ in range(prompt)]
        self.mask = [0] * prompt
        self.logprobs = [0.0] * prompt
        self.prompt = prompt

    def add(self, count: int, *, sampled: bool) -> _Row:
        self.ids += [self.rng.randrange(300) for _ in range(count)]
        self.mask += [int(sampled)] * count
        self.logprobs += [-self.rng.expovariate(1.0) if sampled else 0.0 for _ in range(count)]
        return self

    def frozen(self) -> EpisodeRow:
        return EpisodeRow(
            token_ids=tuple(self.ids),
            mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            versions=tuple(3 if sampled else -1 for sampled in self.mask),
            prompt_length=self.prompt,
        )
