"""What user code returned -> what the library works with: prompts, observations, rewards. Inputs are never changed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, TypeAlias

from envgrad.environments.members import StepResult
from envgrad.environments.spec import copied
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, NonFiniteReward
from envgrad.types import Message, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")

Reward: TypeAlias = float | dict[str, float | None] | None


def read_reward(value: object, where: str) -> Reward:
    """A reward as a float, a dict of named components, or None (cannot be scored).

    Numbers of any kind are accepted (bool, numpy scalars, 0-d tensors). NaN is None: a reward that is not known is
    never a 0. A dict without components is None.

    Raises:
        EnvironmentFailure: an infinite reward, or something that is no reward.

    Example:
        >>> read_reward(True, "get_reward"), read_reward({"win": 1, "style": float("nan")}, "get_reward")
        (1.0, {'win': 1.0, 'style': None})
    """
    if not isinstance(value, Mapping):
        return _read_number(value, where)
    for name in value:
        if not isinstance(name, str):
            raise EnvironmentFailure(f"{where} returned a component named {name!r}: names must be strings.")
    return {name: _read_number(item, f"{where}[{name!r}]") for name, item in value.items()} or None


def read_group_rewards(value: object, count: int, where: str) -> list[float | None]:
    """One reward per sibling, as ``group_reward`` returned them.

    Raises:
        EnvironmentFailure: not a list of ``count`` rewards.

    Example:
        >>> read_group_rewards([1, None], 2, "group_reward")
        [1.0, None]
    """
    to_list = getattr(value, "tolist", None)  # numpy's and torch's arrays
    items = to_list() if callable(to_list) else value
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise EnvironmentFailure(f"{where} returned {value!r}: it must return a list with one reward per environment.")
    if len(items) != count:
        raise EnvironmentFailure(
            f"{where} returned {len(items)} rewards for {count} environments: return one for each."
        )
    return [_read_number(item, f"{where}[{index}]") for index, item in enumerate(items)]


def _read_number(value: object, where: str) -> float | None:
    if value is None:
        return None
    shape = getattr(value, "shape", ())
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat) or tuple(shape) != ():
        raise EnvironmentFailure(
            f"{where} returned {_short(value)} ({type(value).__name__}): a reward is a number, None, or a dict of them."
        )
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailure(f"{where} returned {_short(value)}, which is no float: {error}.") from error
    if math.isinf(number):
        raise NonFiniteReward(f"{where} returned {number}: a reward must be finite (None or NaN: cannot be scored).")
    return None if math.isnan(number) else number


def read_step(value: object, where: str) -> StepResult:
    """What ``step`` returned, as a ``StepResult`` with a checked observation, reward and end.

    Raises:
        EnvironmentContractError: it is none of the accepted forms.
        EnvironmentFailure: its reward is no finite number.

    Example:
        >>> read_step(("You fell.", True), "step").done
        True
    """
    if isinstance(value, str):
        return StepResult(value)
    if isinstance(value, tuple) and len(value) == 2:
        value = StepResult(value[0], done=value[1])
    if not isinstance(value, StepResult):
        form = f"a tuple of {len(value)}" if isinstance(value, tuple) else _short(value)
        raise EnvironmentContractError(
            f"{where} returned {form}: return an observation string, (observation, done), or "
            "StepResult(observation, reward, done, info)."
        )
    if not isinstance(value.observation, str):
        raise EnvironmentContractError(
            f"{where} returned the observation {_short(value.observation)}: it must be a string (text only)."
        )
    done: object = value.done
    if not isinstance(done, int) and getattr(done, "shape", None) != ():
        raise EnvironmentContractError(f"{where} returned done={done!r}: it must be true or false.")
    return StepResult(value.observation, _read_number(value.reward, f"{where}'s reward"), bool(done), value.info)


def opening_messages(result: object, row_prompt: Prompt, where: str) -> list[Message]:
    """The chat that opens an episode, from what ``reset`` returned and the row's prompt.

    ==================  ============================================================================================
    ``reset`` returned  the opening
    ==================  ============================================================================================
    a string            put right behind the row's prompt (a string, or its last message if that is the user's);
                        else a new user message
    text blocks         the same, as content blocks
    a list of messages  these, in place of the row's prompt
    None                the row's prompt
    ==================  ============================================================================================

    Raises:
        EnvironmentContractError: no prompt from anywhere, content that is not text, or a malformed message.

    Example:
        >>> opening_messages(" Guess.", [{"role": "system", "content": "Be brief."}], "reset")
        [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': ' Guess.'}]
        >>> opening_messages(" Guess.", "A number from 1 to 9.", "reset")
        [{'role': 'user', 'content': 'A number from 1 to 9. Guess.'}]
    """
    if _is_chat(result, where):
        return _read_messages(result, f"{where}: the list it returned")
    opening = row_messages(row_prompt, f"{where}: the row's prompt")
    if result is None:
        if not opening:
            raise EnvironmentContractError(
                f"{where} returned None and the task has no prompt: return the prompt from reset, as a string or "
                "a list of messages, or add a 'prompt' column."
            )
        return opening
    content = result if isinstance(result, str) else _read_blocks(result, f"{where}: the content it returned")
    if opening and opening[-1]["role"] == "user":
        opening[-1]["content"] = _joined(opening[-1]["content"], content)
    else:
        opening.append({"role": "user", "content": content})
    return opening


def _is_chat(result: object, where: str) -> bool:
    if result is None or isinstance(result, str):
        return False
    if not isinstance(result, list) or not all(isinstance(item, Mapping) for item in result):
        raise EnvironmentContractError(
            f"{where} returned {_short(result)} ({type(result).__name__}): return a string, a list of messages, a list "
            "of content blocks, or None."
        )
    if not result:
        raise EnvironmentContractError(f"{where} returned an empty list: return None to keep the row's prompt.")
    with_role = sum("role" in item for item in result)
    if with_role not in (0, len(result)):
        raise EnvironmentContractError(
            f"{where} returned a list in which {with_role} of {len(result)} entries have a 'role': messages all have "
            "one, content blocks have none."
        )
    return with_role > 0


def row_messages(prompt: Prompt, where: str) -> list[Message]:
    """The chat of a row's prompt, copied; empty if it has none.

    Raises:
        EnvironmentContractError: neither text nor messages, content that is not text, or a malformed message.

    Example:
        >>> row_messages("1+1?", "row 0"), row_messages(None, "row 1")
        ([{'role': 'user', 'content': '1+1?'}], [])
    """
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return _read_messages(prompt, where)


def _read_messages(messages: object, where: str) -> list[Message]:
    if not isinstance(messages, Sequence):
        raise EnvironmentContractError(f"{where} must be a string or a list of messages, got {_short(messages)}.")
    return [_read_message(message, f"{where}, message {index}") for index, message in enumerate(messages)]


def _read_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise EnvironmentContractError(f"{where} must be a dict with role and content, got {_short(message)}.")
    # datasets fill the keys that other rows have with None
    read: Message = {key: copied(value) for key, value in message.items() if value is not None}
    if read.get("role") not in ROLES:
        raise EnvironmentContractError(
            f"{where} has the role {message.get('role')!r}: it must be one of {list(ROLES)}."
        )
    content = read.get("content")
    calls = read.get("tool_calls")
    listed = isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)
    if calls is not None and (read["role"] != "assistant" or not listed):
        raise EnvironmentContractError(f"{where}: tool_calls must be a list of dicts, in an assistant message.")
    if content is None:
        if not calls:
            raise EnvironmentContractError(f"{where} has no content: only an assistant message with tool_calls may.")
        read["content"] = None
    elif not isinstance(content, str):
        read["content"] = _read_blocks(content, where)
    return read


def _read_blocks(blocks: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(blocks, list):
        raise EnvironmentContractError(f"{where} has the content {_short(blocks)}: it must be a string or text blocks.")
    read: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        text = block.get("text") if isinstance(block, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            what = f"a block of type {kind!r}" if kind not in (None, "text") else f"the block {_short(block)}"
            raise EnvironmentContractError(
                f"{where} has {what}, but prompts are text only: use {{'type': 'text', 'text': ...}}."
            )
        read.append({"type": "text", "text": text})
    return read


def _joined(first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*_as_blocks(first), *_as_blocks(second)]


def _as_blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else shown[:117] + "..."


def plain_state(label: str, state: object) -> object:
    """``state``, which ``state_dict`` of the environment ``label`` returned.

    Raises:
        EnvironmentContractError: it is no mapping of what JSON holds: names, numbers, texts, lists and mappings.
    """
    try:
        same = isinstance(state, dict) and json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise EnvironmentContractError(
            f"{label}: state_dict returned {state!r:.200}, which a checkpoint cannot hold: it must be a dict of "
            "strings, finite numbers, booleans, None, lists and dicts with string keys (a tuple comes back as a list)"
        )
    return state
