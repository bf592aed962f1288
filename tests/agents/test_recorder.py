"""Calls become rows: what extends a row is appended to it, what does not begins one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from envgrad.agents.recorder import Recorder
from envgrad.agents.wire import ApiError, ChatRequest, Reply, read_request
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import inspect_environment
from envgrad.errors import SamplerFailure
from envgrad.rollout.context import EpisodeContext
from envgrad.rollout.opening import Opening
from envgrad.sampling.sampler import SamplingParams
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.types import StopReason, Task
from helpers.world import LIMITS, RENDERER, Counter, call, ids, turn

SPEC = inspect_environment("count", Counter)[0]
TOOLS = [tool.schema for tool in SPEC.tools]
TASK = Task(position=0, split="train", environment="count", group_id=1, seed=2)
USER = {"role": "user", "content": "Count."}


def recorder(script: Any, latency: float = 0.0, **limits: Any) -> tuple[Recorder, ScriptedSampler]:
    sampler = ScriptedSampler(script, latency=latency)
    context = EpisodeContext(
        spec=SPEC, renderer=RENDERER, sampler=sampler, workers=WorkerPool(1),
        sampling=SamplingParams(max_tokens=1, stop_token_ids=RENDERER.stop_token_ids),
        limits=replace(LIMITS, **limits) if limits else LIMITS,
    )  # fmt: skip
    opening = Opening(messages=(USER,), tools=(), schemas=None, prompt_ids=tuple(RENDERER.open([USER], None)))
    made = Recorder(context, opening, TASK, 0, 0)
    sampler.begin(made.session)
    return made, sampler


def run(
    play: Callable[[Callable[..., Awaitable[Reply]]], Awaitable[Any]], script: Any, **limits: Any
) -> tuple[Recorder, ScriptedSampler]:
    made, sampler = recorder(script, **limits)

    async def ask(messages: list[Any], **body: Any) -> Reply:
        return await made.answer(read_request({"messages": messages, "tools": TOOLS, **body}))

    asyncio.run(play(ask))  # type: ignore[arg-type]
    return made, sampler


def sent_back(reply: Reply, **changes: Any) -> dict[str, Any]:
    """The answer as an OpenAI client sends it again: keys that are None, arguments as JSON text."""
    from envgrad.agents.wire import completion_body

    message = completion_body(reply)["choices"][0]["message"]
    return {**message, "audio": None, "annotations": None, **changes}


FIRST, SECOND = turn(call("inc", n=1)), turn("done")


def test_the_row_only_grows_while_messages_extend() -> None:
    async def play(ask: Any) -> None:
        one = await ask([USER])
        assert one.finish_reason == "tool_calls" and one.cached_tokens == 0
        result = {"role": "tool", "tool_call_id": one.message["tool_calls"][0]["id"], "content": "now 1"}
        two = await ask([USER, sent_back(one), result])
        assert two.finish_reason == "stop" and two.message["content"] == "done"
        assert two.cached_tokens == one.prompt_tokens + one.completion_tokens

    made, sampler = run(play, [FIRST, SECOND])
    opening = RENDERER.open([USER], TOOLS)
    suffix = RENDERER.suffix(FIRST, [{"role": "tool", "name": "inc", "content": "now 1"}], TOOLS)
    (row,) = made.rows()
    assert row.token_ids == (*opening, *FIRST, *suffix, *SECOND)
    assert row.mask == (0,) * len(opening) + (1,) * len(FIRST) + (0,) * len(suffix) + (1,) * len(SECOND)
    assert sampler.requests[1].prompt_ids == (*opening, *FIRST, *suffix)
    assert made.stop_reason() is StopReason.ANSWER
    first, second = made.turns()
    assert (first.start, second.start) == (len(opening), len(opening) + len(FIRST) + len(suffix))
    assert first.outcomes[0].tool == "inc" and first.outcomes[0].content == "now 1"
    assert [message["role"] for message in made.messages()] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"content": " \n"}, id="trimmed"),
        pytest.param({"arguments": '{"n":1}'}, id="arguments written anew"),
        pytest.param({"reasoning_content": None}, id="reasoning dropped"),
    ],
)
def test_an_answer_is_recognized_in_the_forms_that_clients_send(changed: dict[str, Any]) -> None:
    async def play(ask: Any) -> None:
        answer = sent_back(await ask([USER]))
        if "arguments" in changed:
            answer["tool_calls"][0]["function"]["arguments"] = changed["arguments"]
        else:
            answer |= changed
        await ask([USER, answer, {"role": "tool", "tool_call_id": "c00000000", "content": "now 1"}])

    assert len(run(play, [FIRST, SECOND])[0].rows()) == 1


@pytest.mark.parametrize("change", ["opening", "answer", "tools", "role", "shorter"])
def test_what_does_not_extend_a_row_begins_one(change: str) -> None:
    async def play(ask: Any) -> None:
        one = sent_back(await ask([USER]))
        result = {"role": "tool", "tool_call_id": "c00000000", "content": "now 1"}
        system = {"role": "system", "content": "Hurry."}
        other = {**one, "tool_calls": None, "content": "I changed my mind."}
        match change:
            case "opening":
                await ask([{"role": "user", "content": "Count!"}, one, result])
            case "answer":
                await ask([USER, other, {"role": "user", "content": "Go on."}])
            case "tools":
                await ask([USER, one, result], tools=[])
            case "role":
                await ask([USER, one, result, system])
            case "shorter":
                await ask([USER])

    made, sampler = run(play, lambda prompt, params, session: SECOND if session.key.endswith("row-1") else FIRST)
    main, branch = made.rows()  # the row of the last answer comes first
    assert main.token_ids[-len(SECOND) :] == tuple(SECOND) and branch.token_ids[-len(FIRST) :] == tuple(FIRST)
    assert sum(main.mask) == len(SECOND)
    assert [one.row for one in made.turns()] == [1, 0]
    assert sampler.open_sessions == {"train/0/0/0", "train/0/0/0/row-1"}
    made.close()
    assert sampler.open_sessions == {"train/0/0/0"}


def test_a_row_that_is_left_can_be_taken_up_again() -> None:
    """A sub-agent works between two calls of the main one."""

    async def play(ask: Any) -> None:
        one = sent_back(await ask([USER]))
        await ask([{"role": "user", "content": "You are a helper."}])
        await ask([USER, one, {"role": "tool", "tool_call_id": "c00000000", "content": "now 1"}])

    made, sampler = run(play, lambda prompt, params, session: SECOND if session.key.endswith("row-1") else FIRST)
    main, helper = made.rows()
    assert [turn.row for turn in made.turns()] == [0, 1, 0]
    assert sum(main.mask) == 2 * len(FIRST) and sum(helper.mask) == len(SECOND)
    assert len({request.params.seed for request in sampler.requests}) == 3


def test_calls_at_the_same_time_have_rows_of_their_own() -> None:
    async def play(ask: Any) -> None:
        one = await ask([USER])
        again = [USER, sent_back(one), {"role": "tool", "tool_call_id": "c00000000", "content": "now 1"}]
        await asyncio.gather(ask(again), ask(again), ask([USER]))

    made, _ = run(play, lambda *_: FIRST, latency=0.02)
    assert len(made.rows()) == 3
    assert sorted(sum(row.mask) for row in made.rows()) == [len(FIRST), len(FIRST), 2 * len(FIRST)]


def test_a_call_that_is_given_up_leaves_nothing() -> None:
    async def play(ask: Any) -> None:
        given_up = asyncio.ensure_future(ask([USER]))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await ask([USER])

    made, _ = run(play, lambda *_: SECOND, latency=0.05)
    (row,) = made.rows()
    assert sum(row.mask) == len(SECOND) and len(made.turns()) == 1


def refused(script: Any, calls: int, **limits: Any) -> tuple[Recorder, ApiError]:
    errors: list[ApiError] = []

    async def play(ask: Any) -> None:
        messages: list[Any] = [USER]
        for _ in range(calls):
            try:
                reply = await ask(messages)
            except ApiError as error:
                errors.append(error)
                return
            messages += [sent_back(reply), {"role": "user", "content": "More."}]

    made, _ = run(play, script, **limits)
    return made, errors[0]


def test_limits_refuse_further_calls_and_end_the_episode() -> None:
    made, error = refused(lambda *_: SECOND, 3, max_turns=2)
    assert error.status == 400 and made.stop_reason() is StopReason.MAX_TURNS and len(made.turns()) == 2
    spent = len(SECOND) + len(RENDERER.suffix(SECOND, [{"role": "user", "content": "More."}], TOOLS))
    made, error = refused(lambda *_: SECOND, 9, max_completion_length=spent + 1)
    assert error.code == "context_length_exceeded" and made.stop_reason() is StopReason.MAX_COMPLETION_LENGTH
    assert sum(made.rows()[0].mask) == len(SECOND) + 1
    made, error = refused(lambda *_: SECOND, 9, max_context=len(RENDERER.open([USER], TOOLS)) + 1)
    assert made.stop_reason() is StopReason.CONTEXT


def test_completion_length_counts_all_rows() -> None:
    async def play(ask: Any) -> None:
        await ask([USER])
        reply = await ask([{"role": "user", "content": "Other."}])
        assert reply.finish_reason == "length"

    made, _ = run(play, lambda *_: SECOND, max_completion_length=2 * len(SECOND) - 1)
    assert made.stop_reason() is StopReason.MAX_COMPLETION_LENGTH


def test_a_clients_own_limit_is_no_truncation() -> None:
    async def play(ask: Any) -> None:
        reply = await ask([USER], max_tokens=2)
        assert reply.finish_reason == "length" and reply.completion_tokens == 2
        await ask([USER, sent_back(reply), {"role": "user", "content": "Go on."}])

    made, _ = run(play, lambda *_: ids("one two three") + turn())
    assert made.stop_reason() is StopReason.ANSWER and len(made.rows()) == 1


def test_a_stop_text_of_the_clients_is_cut_from_the_answer_and_not_from_the_row() -> None:
    answer = turn("think. STOP never")

    async def play(ask: Any) -> None:
        reply = await ask([USER], stop=["STOP"])
        assert reply.message["content"] == "think. "
        await ask([USER, sent_back(reply), {"role": "user", "content": "On."}])

    made, sampler = run(play, lambda *_: answer)
    assert sampler.requests[0].params.stop_strings == ("STOP",)
    assert len(made.rows()) == 1 and sum(made.rows()[0].mask) == 2 * len(answer)


def test_logprobs_are_the_samplers() -> None:
    async def play(ask: Any) -> None:
        reply = await ask([USER], logprobs=True)
        assert [token.logprob for token in reply.logprobs or ()] == [-0.5] * len(SECOND)
        assert "".join(token.text for token in reply.logprobs or ()) == "done"

    run(play, [(SECOND, [-0.5] * len(SECOND))])


def test_a_samplers_failure_is_kept_and_told_again() -> None:
    def fail(*_: Any) -> list[int]:
        raise SamplerFailure("gone")

    made, error = refused(fail, 1)
    assert error.status == 500 and str(made.failure) == "gone"
    with pytest.raises(ApiError, match="gone"):
        asyncio.run(made.answer(ChatRequest(messages=(USER,))))


def test_after_the_end_nothing_is_answered() -> None:
    made, _ = recorder([SECOND])
    made.close()
    with pytest.raises(ApiError) as raised:
        asyncio.run(made.answer(ChatRequest(messages=(USER,))))
    assert raised.value.status == 410 and raised.value.code == "episode_over"


def test_nothing_asked_is_the_opening_alone() -> None:
    made, _ = recorder([])
    (row,) = made.rows()
    assert row.token_ids == tuple(RENDERER.open([USER], None)) and not any(row.mask)
    assert made.messages() == (USER,) and made.stop_reason() is StopReason.DONE
