from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.sampling.endpoint import Endpoint, EndpointSampler
from envgrad.sampling.endpoint_chat import EndpointRenderer
from envgrad.sampling.sampler import Completion, SamplingParams, Session
from helpers.chat_server import ChatServer, chat_server, message

SESSION = Session(key="eval/0/0/0", group="eval/0", order=(0, 0, 0))
TOOL = {"type": "function", "function": {"name": "inc", "description": "Add.", "parameters": {"type": "object"},
        "return": {"type": "string"}}}  # fmt: skip
ASK = [{"role": "user", "content": "Add."}]


def sampler_of(server: ChatServer, **options: Any) -> EndpointSampler:
    endpoint = Endpoint(url=server.url, model="m", **options)
    return EndpointSampler(endpoint, EndpointRenderer(), max_connections=4)


def sample(sampler: EndpointSampler, row: Sequence[int], **params: Any) -> Completion:
    given = {"max_tokens": 64, "seed": 3} | params
    return asyncio.run(sampler.sample(row, SamplingParams(**given), SESSION))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host:8000", "http://host:8000/v1/chat/completions"),
        ("http://host:8000/", "http://host:8000/v1/chat/completions"),
        ("https://host/v1/", "https://host/v1/chat/completions"),
        ("https://host/api/v3", "https://host/api/v3/chat/completions"),
        ("https://host/v1/chat/completions", "https://host/v1/chat/completions"),
    ],
)
def test_chats_go_where_the_url_says(url: str, address: str) -> None:
    assert Endpoint(url=url, model="m").chat_url == address


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"url": "localhost:8000"}, "is no URL"),
        ({"url": "ftp://host/v1"}, "is no URL"),
        ({"url": "http://"}, "is no URL"),
        ({"model": ""}, "name of the model"),
        ({"request_timeout": 0.0}, "request_timeout=0.0"),
        ({"patience": float("inf")}, "patience=inf"),
        ({"max_context": 1}, "max_context=1"),
        ({"api_key_env": "ENVGRAD_NO_SUCH_KEY"}, "ENVGRAD_NO_SUCH_KEY"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Endpoint(**({"url": "http://host/v1", "model": "m"} | given))


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVGRAD_TEST_KEY", "sesame\n")
    with chat_server(lambda body, number: message("hi")) as server:
        sampler = sampler_of(server, api_key_env="ENVGRAD_TEST_KEY")
        sample(sampler, sampler._renderer.open(ASK, None))
        sampler.close()
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    assert server.paths == ["/v1/chat/completions"]
    assert "sesame" not in repr(sampler.endpoint)


def test_a_turn_is_asked_for_with_its_chat_its_tools_and_its_limits() -> None:
    with chat_server(lambda body, number: message("", ("inc", '{"n": 1}'))) as server:
        sampler = sampler_of(server)
        renderer = sampler._renderer
        row = renderer.open(ASK, [TOOL])
        first = sample(sampler, row, seed=1 << 62 | 5)
        assert (len(first.token_ids), first.stop_reason, first.policy_version) == (5, "stop", 0)
        assert set(first.logprobs) == {0.0}
        row += first.token_ids
        row += renderer.suffix(
            first.token_ids, [{"role": "tool", "tool_call_id": "call_0", "content": "now 1"}], [TOOL]
        )
        sample(sampler, row, max_tokens=9, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, stop_strings=("END",))
        sampler.close()
    plain, full = server.requests
    assert plain == {
        "model": "m", "messages": ASK, "max_tokens": 64, "temperature": 1.0, "seed": 5,
        "tools": [{"type": "function", "function": {key: TOOL["function"][key] for key in
                   ("name", "description", "parameters")}}],
    }  # fmt: skip
    assert [said["role"] for said in full["messages"]] == ["user", "assistant", "tool"]
    assert {key: full[key] for key in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")} == {
        "max_tokens": 9, "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "stop": ["END"],
    }  # fmt: skip
    assert (sampler.usage.requests, sampler.usage.prompt_tokens, sampler.usage.completion_tokens) == (2, 40, 10)
    assert sampler.usage.estimated == 0


def test_an_answer_that_was_cut_is_said_to_be() -> None:
    with chat_server(lambda body, number: message("and so", finish_reason="length")) as server:
        sampler = sampler_of(server)
        assert sample(sampler, sampler._renderer.open(ASK, None)).stop_reason == "length"
        sampler.close()


def test_tokens_that_the_server_does_not_count_are_estimated() -> None:
    with chat_server(lambda body, number: message("x" * 400, usage=None)) as server:
        sampler = sampler_of(server)
        completion = sample(sampler, sampler._renderer.open(ASK, None))
        sampler.close()
    assert 100 <= len(completion.token_ids) <= 120
    assert sampler.usage.estimated == 1 and sampler.usage.prompt_tokens >= 1


def test_a_context_given_bounds_what_is_asked_for_by_what_the_server_has_counted() -> None:
    usage = {"prompt_tokens": 50, "completion_tokens": 10}
    with chat_server(lambda body, number: message("hi", usage=usage)) as server:
        sampler = sampler_of(server, max_context=80)
        renderer = sampler._renderer
        sampler.begin(SESSION)
        row = renderer.open(ASK, None)
        first = sample(sampler, row, max_tokens=1000)
        row += first.token_ids
        sample(sampler, row, max_tokens=1000)
        # The server counted 50 before the first answer: 50 + 10 leave 20.
        assert [request["max_tokens"] for request in server.requests] == [80 - (len(row) - 10), 20]
        row += renderer.suffix(first.token_ids, [{"role": "user", "content": "x" * 4000}], None)
        full = sample(sampler, row, max_tokens=1000)
        sampler.end(SESSION)
        sampler.close()
    assert full.stop_reason == "length" and len(server.requests) == 2


def test_a_chat_that_is_too_long_for_the_server_ends_its_episode(caplog: pytest.LogCaptureFixture) -> None:
    with chat_server(lambda body, number: {"status": 400, "text": "maximum context length"}) as server:
        sampler = sampler_of(server)
        row = sampler._renderer.open(ASK, None)
        completions = [sample(sampler, row), sample(sampler, row)]
        sampler.close()
    assert {completion.stop_reason for completion in completions} == {"length"}
    assert sampler._renderer.read(completions[0].token_ids, None).message["content"] == ""
    assert sum("too long for m" in record.message for record in caplog.records) == 1


def test_its_weights_are_its_own() -> None:
    with chat_server(lambda body, number: message("hi")) as server:
        sampler = sampler_of(server)
        sampler.update_weights(0, None)
        for version, tensors in ((1, None), (0, {"w": torch.zeros(1)})):
            with pytest.raises(ConfigurationError, match="cannot be trained"):
                sampler.update_weights(version, tensors)
        sampler.close()
        sampler.close()
        with pytest.raises(SamplerFailure, match="closed"):
            sample(sampler, sampler._renderer.open(ASK, None))


def test_there_must_be_a_connection() -> None:
    with pytest.raises(ConfigurationError, match="max_connections=0"):
        EndpointSampler(Endpoint(url="http://host", model="m"), EndpointRenderer(), max_connections=0)
