from __future__ import annotations

from envgrad.rewards.exchange import answer_text, exchange_of
from envgrad.types import Turn
from helpers.rewards import answered, called, made, plain, task


def test_a_chat_is_split_behind_its_opening():
    exchange = exchange_of(called(), has_tools=True)
    assert [message["role"] for message in exchange.prompt] == ["system", "user"]
    assert [message["role"] for message in exchange.completion] == ["assistant", "tool", "assistant"]
    assert exchange.completion[0]["tool_calls"][0]["function"] == {"name": "inc", "arguments": {"n": [1]}}
    assert exchange.completion[2] == {"role": "assistant", "content": "done", "reasoning_content": "enough"}
    assert exchange.completion_ids == [7, 8, 9, 10]


def test_an_opening_may_hold_earlier_answers():
    message = {"role": "assistant", "content": "B"}
    opening = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "b?"},
    ]
    turn = Turn(start=2, num_tokens=1, policy_version=0, message=message, text="B")
    exchange = exchange_of(made([turn], [*opening, message], (7,)), has_tools=False)
    assert (exchange.prompt, exchange.completion) == (opening, [message])


def test_observations_of_step_belong_to_the_completion():
    first, last = {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}
    seen = {"role": "user", "content": ""}
    turns = [
        Turn(start=2, num_tokens=1, policy_version=0, message=first, observation="", text="x"),
        Turn(start=4, num_tokens=1, policy_version=0, message=last, text="y"),
    ]
    episode = made(turns, [{"role": "user", "content": "go"}, first, seen, last], (7, 8, 9))
    assert exchange_of(episode, has_tools=False).completion == [first, seen, last]


def test_reasoning_stays_in_the_content_where_there_are_no_tools():
    episode = answered("4", reasoning="2+2", raw="<think>\n2+2\n</think>\n\n4")
    assert exchange_of(episode, has_tools=False).completion == [
        {"role": "assistant", "content": "<think>\n2+2\n</think>\n\n4"}
    ]
    parts = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert exchange_of(episode, has_tools=True).completion == [parts]
    # Marks that are tokens of their own never were text: reasoning stays apart.
    assert exchange_of(answered("4", reasoning="2+2", raw="[THINK]2+2[/THINK]4"), has_tools=False).completion == [parts]


def test_plain_text_is_what_was_sampled():
    exchange = exchange_of(plain(" is 2", prompt="1+1"), has_tools=False)
    assert (exchange.prompt, exchange.completion) == ("1+1", " is 2")
    thought = answered("4", prompt="2+2", reasoning="hm", raw=" <think>hm</think> 4", plain_prompt="2+2")
    assert exchange_of(thought, has_tools=False).completion == " <think>hm</think> 4"


def test_plain_text_of_several_turns_has_the_observations_between_them():
    first, last = {"role": "assistant", "content": "left"}, {"role": "assistant", "content": "up"}
    turns = [
        Turn(start=2, num_tokens=1, policy_version=0, message=first, observation="a wall", text="left"),
        Turn(start=4, num_tokens=1, policy_version=0, message=last, observation="out", text="up"),
    ]
    messages = [{"role": "user", "content": "go"}, first, {"role": "user", "content": "a wall"}, last]
    episode = made(turns, [*messages, {"role": "user", "content": "out"}], (7, 8, 9), plain_prompt="go")
    # The last observation was never put into the row.
    assert exchange_of(episode, has_tools=False).completion == "left\na wall\nup"


def test_the_prompt_decides_and_not_the_row():
    row = {"images": [], "prompt": [{"role": "user", "content": "of the row"}]}
    assert exchange_of(plain("x", prompt="used", task=task(row)), has_tools=False).prompt == "used"
    chat = exchange_of(answered("x", task=task({"prompt": "of the row"})), has_tools=False)
    assert chat.prompt == [{"role": "user", "content": "Say."}]


def test_what_is_given_is_a_copy():
    episode = called()
    exchange = exchange_of(episode, has_tools=True)
    exchange.prompt[0]["content"] = "changed"
    exchange.completion[0]["tool_calls"][0]["function"]["arguments"]["n"].append(2)
    exchange.completion.clear()
    exchange.completion_ids.clear()
    assert episode.messages[0]["content"] == "Be brief."
    assert episode.messages[2]["tool_calls"][0]["function"]["arguments"] == {"n": [1]}
    assert len(episode.token_ids) == 6


def test_the_last_answer_of_a_completion():
    assert answer_text("text") == "text"
    assert answer_text([{"content": "no role"}]) == "no role"
    assert answer_text([{"role": "tool", "content": "now 1"}]) == "" == answer_text([])
    assert answer_text(exchange_of(called(), has_tools=True).completion) == "<think>\nenough\n</think>\ndone"
    assert answer_text([{"role": "assistant", "content": "", "reasoning_content": "hm"}]) == "<think>\nhm\n"
