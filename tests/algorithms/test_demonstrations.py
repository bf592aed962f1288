from __future__ import annotations

from typing import Any

import pytest

from envgrad.algorithms.demonstrations import Reprompting, opening_messages, own_feedback, transcript
from envgrad.algorithms.grpo import GRPO
from envgrad.errors import ConfigurationError
from envgrad.types import Episode, Group, Message, StopReason, Task, ToolCall, ToolOutcome, Turn
from helpers.world import RENDERER, TOKENIZER

OPENING: tuple[Message, ...] = ({"role": "system", "content": "Play."}, {"role": "user", "content": "2+3?"})
TASK = Task(position=0, split="train", environment="e", group_id=1, seed=2)


def turn(content: str, *outcomes: tuple[str, Any, str, bool], observation: str | None = None, **more: Any) -> Turn:
    calls = tuple(
        ToolOutcome(call=ToolCall(id=f"c{i}", name=name, arguments=arguments), content=result, ok=ok)
        for i, (name, arguments, result, ok) in enumerate(outcomes)
    )
    message = {"role": "assistant", "content": content, **more}
    return Turn(start=3, num_tokens=1, policy_version=0, message=message, outcomes=calls, observation=observation)


def episode(sibling: int, reward: float | None, *turns: Turn, **changes: Any) -> Episode:
    messages = list(changes.pop("opening", OPENING))
    prompt = RENDERER.open(messages, None)
    for one in turns:
        messages.append(one.message)
        messages += [{"role": "tool", "content": outcome.content} for outcome in one.outcomes]
        messages += [] if one.observation is None else [{"role": "user", "content": one.observation}]
    ids = (*prompt, 7 + sibling, 8)
    given: dict[str, Any] = {
        "task": TASK, "sibling": sibling, "token_ids": ids, "mask": (0,) * len(prompt) + (1, 1),
        "logprobs": (0.0,) * len(ids), "versions": (0,) * len(ids), "prompt_length": len(prompt),
        "messages": tuple(messages), "turns": turns, "stop_reason": StopReason.ANSWER, "reward": reward,
    }  # fmt: skip
    return Episode(**(given | changes))


def group(*episodes: Episode) -> Group:
    return Group(task=TASK, episodes=episodes)


def prompts(how: Reprompting, *episodes: Episode, **options: Any) -> list[str | None]:
    of_round = group(*episodes)
    done = how.apply([of_round], GRPO().credit([of_round]), RENDERER, **options)
    ids = [sample.teacher_prompt for sample in done.samples]
    return [None if one is None else TOKENIZER.decode(one) for one in ids]


def test_a_failed_sibling_sees_the_first_solved_one_and_the_only_solved_one_sees_nothing() -> None:
    rows = [episode(0, 0.0, turn("6")), episode(1, 1.0, turn("five")), episode(2, 1.0, turn("5")), episode(3, None)]
    first, second, third = prompts(Reprompting(), *rows)
    shown = "2+3?\nCorrect solution:\n\n{}\n\n\n\nCorrectly solve the original question.\n"
    for text, answer in ((first, "five"), (second, "5"), (third, "five")):
        messages = [OPENING[0], {"role": "user", "content": shown.format(answer)}]
        assert text == TOKENIZER.decode(RENDERER.open(messages, None))
    assert prompts(Reprompting(), *rows[:2])[1] is None, "it is not its own demonstration"
    assert prompts(Reprompting(dont_reprompt_on_self_success=False), *rows[:2])[1] is not None
    assert prompts(Reprompting(success_reward_threshold=2.0), *rows) == [None] * 3


def test_metrics_count_what_there_was() -> None:
    rows = [episode(0, 0.0, turn("6")), episode(1, 1.0, turn("5")), episode(2, 0.0, turn("4"), feedback="too low")]
    of_round = [group(*rows), group(episode(0, 0.0, turn("1")), episode(1, 0.0, turn("2")))]
    how = Reprompting(include_environment_feedback=True)
    found = how.apply([of_round[0]], GRPO().credit([of_round[0]]), RENDERER).metrics
    assert found == {
        "self_distillation/success_group_fraction": 1.0,
        "self_distillation/success_sample_fraction": pytest.approx(2 / 3),
        "self_distillation/feedback_available_fraction": pytest.approx(1 / 3),
        "self_distillation/feedback_used_fraction": pytest.approx(1 / 3),
        "self_distillation/reprompt_cut_fraction": 0.0,
        "self_distillation/reprompt_sample_fraction": pytest.approx(2 / 3),
    }
    assert how.apply([], [], RENDERER).metrics["self_distillation/reprompt_sample_fraction"] == 0.0


def test_feedback_is_the_environments_word_else_the_rows_else_what_the_tools_answered() -> None:
    how = Reprompting(include_environment_feedback=True)
    tools = turn("", ("guess", {"number": 3}, "higher", True), ("gess", None, "no tool 'gess'", False))
    row = Task(position=0, split="train", environment="e", group_id=1, seed=2, row={"privileged_context": "it is odd"})
    assert how.feedback(episode(0, 0.0, tools, feedback="stop early")) == "stop early"
    assert how.feedback(episode(0, 1.0, tools, feedback="stop early")) == "stop early"
    assert how.feedback(episode(0, 0.0, tools, task=row)) == "it is odd"
    own = "guess({\"number\": 3}) -> higher\ngess(null) -> no tool 'gess'"
    assert how.feedback(episode(0, 0.0, tools)) == own
    assert how.feedback(episode(0, 1.0, tools)) is None, "it did not fail"
    assert how.feedback(episode(0, 0.0, turn("6"))) is None, "nothing answered it"
    assert Reprompting().feedback(episode(0, 0.0, tools, feedback="stop early")) is None
    assert own_feedback(episode(0, 0.0, turn("a", observation="cold"), turn("b", observation="warm"))) == (
        "-> cold\n-> warm"
    )


def test_feedback_may_wait_until_there_is_no_solution() -> None:
    rows = [episode(0, 0.0, turn("6"), feedback="too high"), episode(1, 1.0, turn("5"), feedback="well done")]
    both = prompts(Reprompting(include_environment_feedback=True), *rows)
    assert both[0] is not None and "too high" in both[0] and "Correct solution" in both[0]
    assert both[1] is not None and "well done" in both[1] and "Correct solution" not in both[1]
    how = Reprompting(include_environment_feedback=True, environment_feedback_only_without_solution=True)
    either = prompts(how, *rows)
    assert either[0] is not None and "too high" not in either[0] and "Correct solution" in either[0]
    assert either[1] == both[1]


def test_a_played_episode_reads_as_a_transcript() -> None:
    played = episode(
        0,
        1.0,
        turn("I guess.", ("guess", {"number": 3}, "higher", True)),
        turn("", ("guess", {"number": 5}, "ok", True)),
    )
    assert transcript(played) == 'I guess.\nguess({"number": 3}) -> higher\nguess({"number": 5}) -> ok'
    assert opening_messages(played) == OPENING
    spoken = episode(0, 1.0, turn("crane", observation="g...."), turn("grasp", observation="right"))
    assert transcript(spoken) == "crane\n-> g....\ngrasp\n-> right" and opening_messages(spoken) == OPENING


def test_thinking_is_shown_or_left_out() -> None:
    apart = episode(0, 1.0, turn("5", reasoning_content="2+3"))
    inside = episode(0, 1.0, turn("<think>2+3\n</think>\n5"))
    assert transcript(apart) == "<think>\n2+3\n</think>\n5"
    assert transcript(inside) == "<think>2+3\n</think>\n5"
    assert transcript(apart, thinking=False) == transcript(inside, thinking=False) == "5"
    how = Reprompting(remove_thinking_from_demonstration=True)
    (text, _) = prompts(how, episode(1, 0.0, turn("6")), inside)
    assert text is not None and "2+3\n" not in text


def test_the_last_user_message_is_extended_whatever_the_opening_is() -> None:
    blocks = ({"role": "user", "content": [{"type": "text", "text": "2+3?"}]}, {"role": "assistant", "content": "Hm."})
    for opening in (OPENING[:1], blocks):
        rows = [episode(0, 0.0, turn("6"), opening=opening), episode(1, 1.0, turn("5"), opening=opening)]
        text = prompts(Reprompting(), *rows)[0]
        assert text is not None and "Correct solution:\n\n5" in text
    assert "2+3?\nCorrect" in text


def test_siblings_with_another_start_show_nothing() -> None:
    other = ({"role": "user", "content": "4+4?"},)
    assert prompts(Reprompting(), episode(0, 0.0, turn("6")), episode(1, 1.0, turn("8"), opening=other)) == [None, None]


def test_plain_prompts_stay_plain() -> None:
    text = {"plain_prompt": "2+3=", "opening": ({"role": "user", "content": "2+3="},)}
    first, _ = prompts(Reprompting(), episode(0, 0.0, turn("6"), **text), episode(1, 1.0, turn("5"), **text))
    assert first == "2+3=\nCorrect solution:\n\n5\n\n\n\nCorrectly solve the original question.\n"


def test_a_prompt_that_is_too_long_loses_its_beginning() -> None:
    rows = [episode(0, 0.0, turn("6")), episode(1, 1.0, turn("5" * 50))]
    whole = prompts(Reprompting(), *rows)[0]
    cut = prompts(Reprompting(max_reprompt_len=20), *rows)[0]
    fitting = prompts(Reprompting(), *rows, max_context=22)[0]
    assert whole is not None and cut is not None and whole.endswith(cut) and len(cut) < len(whole)
    assert fitting == cut, "two tokens of the answer, 20 of the prompt"
    assert prompts(Reprompting(), *rows, max_context=2) == [None, None], "no room for any prompt"


def test_braces_in_what_is_shown_are_text() -> None:
    rows = [episode(0, 0.0, turn("6"), feedback="{0} {x}"), episode(1, 1.0, turn("{5}"))]
    first, _ = prompts(Reprompting(include_environment_feedback=True), *rows)
    assert first is not None and "{5}" in first and "{0} {x}" in first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solution_template": "none"}, "must have the field {successful_previous_attempt}"),
        ({"reprompt_template": "{prompt}"}, "must have the field {solution}"),
        ({"reprompt_template": "{prompt}{solution}{more}"}, "unknown field {more}"),
        ({"reprompt_template": "{prompt"}, "is no template"),
        ({"include_environment_feedback": True, "feedback_template": "x"}, "must have the field {feedback_raw}"),
        ({"max_reprompt_len": 0}, "max_reprompt_len=0 must be at least 1"),
        ({"use_successful_as_teacher": False}, "leave the teacher nothing"),
        (
            {"use_successful_as_teacher": False, "include_environment_feedback": True,
             "remove_thinking_from_demonstration": True},
            "remove_thinking_from_demonstration=True cannot act",
        ),
        ({"environment_feedback_only_without_solution": True}, "needs both"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Reprompting(**options)
