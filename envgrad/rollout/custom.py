"""The user's own rollouts (``rollout_func``): one call plays a whole group, and its token ids become episodes.

Consumes a task's prompt, once for each sibling; produces a ``Group`` that reward functions have scored. What the
function returns::

    prompt_ids       one list of ids per sibling
    completion_ids   one list of ids per sibling: the policy's tokens, and what the world answered between them
    logprobs         one list per sibling, as long as its completion; None or NaN where unknown
    env_mask         optional: 1 where the policy produced the token, 0 where the world did
    anything else    a column for the reward functions: a list with a value per sibling, or one value for all
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

from envgrad.environments.arguments import shorten
from envgrad.environments.boundary import call_user
from envgrad.environments.results import opening_messages
from envgrad.errors import ConfigurationError, EnvironmentFailure, EpisodeFailure
from envgrad.rollout.context import EpisodeContext, value_or_failure
from envgrad.rollout.finite import check_played, end_if_asked
from envgrad.rollout.group import GroupPolicy
from envgrad.rollout.row import TokenRow
from envgrad.rollout.scoring import RewardBatch, RewardLog, score_group
from envgrad.types import Episode, FailedEpisode, Group, StopReason, Task, Turn

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_WHERE = "rollout_func"


async def play_custom(context: EpisodeContext, policy: GroupPolicy, task: Task) -> Group:
    """One call of ``rollout_func`` with the task's prompt ``num_generations`` times, read and scored.

    Raises:
        ConfigurationError: it returned something that cannot be read as a group; names what, and the rule.
    """
    count = policy.num_generations
    prompt = (task.row or {}).get("prompt")
    function = context.rollout_func
    if function is None:
        raise AssertionError("this context has no rollout_func")
    try:
        prompts = [copy.deepcopy(prompt) for _ in range(count)]
        version = context.sampler.policy_version  # weights may be updated while it runs: the oldest counts
        with context.activity.during("tools", count):
            outcome = await call_user(_WHERE, function, prompts, workers=context.workers, timeout=None)
        output = value_or_failure(outcome, _WHERE, EnvironmentFailure, None)
        episodes = read_rollouts(context, task, output, count, version)
        for episode in episodes:
            check_played(episode, unknown=True)
        batch = RewardBatch(
            episodes=episodes,
            environments=None,
            log=RewardLog(),
            workers=context.workers,
            timeout=context.limits.reward_timeout,
        )
        with context.activity.during("reward", count):
            scored = await score_group(batch, context.reward_sources, context.reward_weights)
    except EpisodeFailure as failure:
        end_if_asked(failure, ends=policy.end_on_nonfinite, where=f"group {task.key}")
        failures = [
            FailedEpisode(task=task, sibling=number, attempts=1, kind=failure.kind, error=failure)
            for number in range(count)
        ]
        return Group(task=task, episodes=(), failures=tuple(failures), faults={failure.kind: 1})
    return Group(task=task, episodes=scored.episodes, metrics=scored.metrics)


def read_rollouts(context: EpisodeContext, task: Task, output: object, count: int, version: int) -> tuple[Episode, ...]:
    """What ``rollout_func`` returned, as ``count`` episodes of one turn each, of policy ``version``.

    Raises:
        ConfigurationError: a missing key, a wrong number of rollouts, or lists of different lengths.
    """
    if not isinstance(output, Mapping):
        raise ConfigurationError(f"{_WHERE} returned a {type(output).__name__}; it must return a dict with {REQUIRED}")
    if missing := [key for key in REQUIRED if key not in output]:
        raise ConfigurationError(f"{_WHERE} returned no {missing}, only {sorted(output)}; it must return {REQUIRED}")
    for key in (*REQUIRED, *(["env_mask"] if output.get("env_mask") is not None else [])):
        if not isinstance(output[key], Sequence) or len(output[key]) != count:
            got = len(output[key]) if isinstance(output[key], Sequence) else repr(output[key])
            raise ConfigurationError(
                f"{_WHERE} returned {key} for {got} rollouts, but it was given {count} prompts; "
                "return one rollout for each prompt"
            )
    columns = {key: value for key, value in output.items() if key not in (*REQUIRED, "env_mask")}
    for key, value in columns.items():
        if isinstance(value, list) and len(value) != count:
            raise ConfigurationError(
                f"{_WHERE} returned {key} with {len(value)} values, but it was given {count} prompts; return a list "
                "with one value for each, or one value that is no list for all"
            )
    return tuple(_episode(context, task, output, columns, number, version) for number in range(count))


def _episode(
    context: EpisodeContext,
    task: Task,
    output: Mapping[str, Any],
    columns: Mapping[str, Any],
    number: int,
    version: int,
) -> Episode:
    prompt_ids = _ids(output["prompt_ids"][number], "prompt_ids", number, context.vocab_size)
    completion = _ids(output["completion_ids"][number], "completion_ids", number, context.vocab_size)
    logprobs = _numbers(output["logprobs"][number], "logprobs", number)
    given = output.get("env_mask")
    mask = [1] * len(completion)
    if given is not None:
        mask = [int(value > 0) for value in _numbers(given[number], "env_mask", number)]
    if not prompt_ids or not len(completion) == len(logprobs) == len(mask):
        raise ConfigurationError(
            f"{_WHERE}: rollout {number} has {len(prompt_ids)} prompt ids, {len(completion)} completion ids, "
            f"{len(logprobs)} logprobs and {len(mask)} mask values; the prompt must not be empty, and the last three "
            "must have one length"
        )
    if len(prompt_ids) + len(completion) > context.limits.max_context:
        raise ConfigurationError(
            f"{_WHERE}: rollout {number} has {len(prompt_ids)} + {len(completion)} tokens, but the model's context "
            f"holds {context.limits.max_context}; end episodes before it is full"
        )
    row = TokenRow(prompt_ids)
    for token, logprob, trained in zip(completion, logprobs, mask, strict=True):
        if trained:
            row.add_sampled([token], [logprob], version=version)
        else:
            row.add_given([token])
    ended = bool(completion) and completion[-1] in context.renderer.stop_token_ids
    prompt = (task.row or {}).get("prompt")
    read = context.renderer.read_text(completion)
    columns = {key: value[number] if isinstance(value, list) else value for key, value in columns.items()}
    return Episode(
        task=replace(task, row={**(task.row or {}), **columns}),
        sibling=number,
        token_ids=tuple(row.token_ids),
        mask=tuple(row.mask),
        logprobs=tuple(row.logprobs),
        versions=tuple(row.versions),
        prompt_length=len(prompt_ids),
        messages=(*opening_messages(None, prompt, _WHERE), read.message),
        turns=(
            Turn(
                start=len(prompt_ids),
                num_tokens=len(completion),
                policy_version=version,
                message=read.message,
                text=read.text,
            ),
        ),
        stop_reason=StopReason.ANSWER if ended else StopReason.MAX_COMPLETION_LENGTH,
        reward=0.0,
        plain_prompt=prompt if isinstance(prompt, str) else None,
    )


def _ids(value: Any, key: str, number: int, vocab_size: int | None) -> list[int]:
    """Token ids from a list or a tensor.

    Raises:
        ConfigurationError: something else, or an id that the model does not have.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or not all(isinstance(item, int) for item in items):
        raise ConfigurationError(f"{_WHERE}: {key}[{number}] is {shorten(repr(value))}; it must be a list of token ids")
    for item in items:
        if item < 0 or (vocab_size is not None and item >= vocab_size):
            raise ConfigurationError(
                f"{_WHERE}: {key}[{number}] has the token id {item}; the model has the ids from 0 to "
                f"{'its vocabulary' if vocab_size is None else vocab_size - 1}"
            )
    return list(items)


def _numbers(value: Any, key: str, number: int) -> list[float]:
    """One number per token from a list or a tensor; NaN where it is None.

    Raises:
        ConfigurationError: something else.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or not all(item is None or isinstance(item, SupportsFloat) for item in items):
        raise ConfigurationError(
            f"{_WHERE}: {key}[{number}] is {shorten(repr(value))}; it must be a list with one number per token"
        )
    return [math.nan if item is None else float(item) for item in items]
