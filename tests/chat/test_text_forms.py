from __future__ import annotations

import pytest

from envgrad.chat.call_forms import CallForm, iter_found
from envgrad.chat.text_forms import BareObjectForm, ChannelForm, PythonForm, TaggedForm
from helpers.chat_templates import TOOLS

TAGGED = TaggedForm(
    open="<tool_call>\n<function=",
    middle=">\n",
    key_open="<parameter=",
    key_close=">\n",
    value_close="\n</parameter>",
    close="</function>\n</tool_call>",
)
PYTHON = PythonForm(open="<s>", close="</s>")
BARE = BareObjectForm(open="<c>", close="</c>", quote="~")


def one(form: CallForm, text: str) -> tuple[object, object, bool]:
    (found,) = iter_found(form, text, TOOLS)
    (call,) = found.calls
    return call.name, call.arguments, call.error is None


def test_tagged_values_keep_their_own_white_space() -> None:
    text = "<tool_call>\n<function=inc>\n<parameter=note>\n\n two \n\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    assert one(TAGGED, text + "</function>\n</tool_call>") == ("inc", {"note": "\n two \n", "n": 3}, True)


def test_tagged_strings_that_look_like_numbers_follow_the_schema() -> None:
    body = "<parameter=note>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    assert one(TAGGED, "<tool_call>\n<function=inc>\n" + body) == ("inc", {"note": "7", "n": 7}, True)


def test_a_tagged_call_without_arguments() -> None:
    assert one(TAGGED, "<tool_call>\n<function=look>\n</function>\n</tool_call>") == ("look", {}, True)


@pytest.mark.parametrize(
    "text", ["<parameter=n", "<parameter=n>\n1", "<parameter=n>\n1\n</parameter>\nmore</function>"]
)
def test_a_tagged_call_that_does_not_parse(text: str) -> None:
    assert one(TAGGED, "<tool_call>\n<function=inc>\n" + text)[2] is False


def test_python_calls() -> None:
    text = '<s>[inc(n=1, note="a </s> b"), box.look(), inc(2, flags=[true, None, {"k": -1.5}])]</s>'
    (found,) = iter_found(PYTHON, text, TOOLS)
    assert [(call.name, call.arguments) for call in found.calls] == [
        ("inc", {"n": 1, "note": "a </s> b"}),
        ("box.look", {}),
        ("inc", {"n": 2, "flags": [True, None, {"k": -1.5}]}),
    ]


@pytest.mark.parametrize(
    "call", ["inc(n=open('x'))", "inc(n=x)", "inc(*[1])", "inc(**{'n': 1})", "look(1)", "3", "inc(n=", "inc(n=1+1)"]
)
def test_python_is_parsed_and_never_evaluated(call: str) -> None:
    assert one(PYTHON, f"<s>[{call}]</s>")[2] is False


def test_bare_objects() -> None:
    text = '<c>inc{n:1,note:~a, {b}: ]~,more:{x:[~y~,2,null,[]],z:{}},"q":true}</c>'
    arguments = {"n": 1, "note": "a, {b}: ]", "more": {"x": ["y", 2, None, []], "z": {}}, "q": True}
    assert one(BARE, text) == ("inc", arguments, True)


@pytest.mark.parametrize("body", ["inc", "inc{n}", "inc{n:~a}", "inc{n:1", "inc{n:1}x", "inc{" + "a:{" * 80])
def test_a_bare_object_that_does_not_parse(body: str) -> None:
    assert one(BARE, f"<c>{body}</c>")[2] is False


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.inc <|constrain|>json<|message|>",
        " to=functions.inc<|channel|>commentary json<|message|>",
        "<|start|>assistant to=functions.inc<|channel|>commentary<|message|>",
    ],
)
def test_channel_headers(header: str) -> None:
    assert one(ChannelForm(), header + '{"n": 1}<|call|>') == ("inc", {"n": 1}, True)
    assert one(ChannelForm(), header + '{"n": 1,}<|call|>')[2] is False
