from __future__ import annotations

import asyncio
import time

import pytest

from envgrad.environments.contract import StepResult, ToolResult
from envgrad.errors import EnvironmentContractError, EnvironmentFailure, EpisodeDone, TooManyFailures
from envgrad.types import StopReason
from helpers.world import RENDERER, TOKENIZER, Counter, call, ids, play, play_one, turn, world


def results(episode):
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


def test_sampled_ids_are_trained_as_sampled_even_where_text_has_another_encoding():
    """`he` + `llo` decodes to `hello`, whose own encoding is one token: re-encoding trains what was not sampled."""
    split = [*ids("he"), *ids("llo")]
    assert TOKENIZER.decode(split) == "hello" and ids("hello") != split
    first = [*split, *turn(call("inc", n=1))]
    second = [*split, *turn()]
    script = [(first, [-0.01 * i for i in range(len(first))]), (second, [-0.5 - i for i in range(len(second))])]
    episode = play_one(Counter, script)
    trained = [(t, lp) for t, lp, m in zip(episode.token_ids, episode.logprobs, episode.mask, strict=True) if m]
    assert trained == [*zip(first, script[0][1], strict=True), *zip(second, script[1][1], strict=True)]
    assert [t for t, m in zip(episode.token_ids, episode.mask, strict=True) if m] == first + second


def test_the_row_decodes_to_the_templates_own_rendering_with_the_separator_untrained():
    episode = play_one(Counter, [turn(call("inc", n=2)), turn("done")])
    text = TOKENIZER.decode(list(episode.token_ids), skip_special_tokens=False)
    tools = None if not episode.messages else [t.schema for t in _tools(Counter)]
    rendered = RENDERER.render(list(episode.messages), tools, generation=False)
    assert text + "\n" == rendered
    first_end = episode.turns[0].start + episode.turns[0].num_tokens
    assert TOKENIZER.decode(list(episode.token_ids[first_end : first_end + 1])) == "\n"
    assert episode.mask[first_end] == 0


def _tools(factory):
    from envgrad.environments.contract import inspect_environment

    return inspect_environment("env", factory)[0].tools


def test_the_sampled_terminator_is_trained_and_another_eos_gets_the_templates_end_untrained():
    end, other = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    renderer_stops = RENDERER.stop_token_ids
    assert end in renderer_stops
    own = play_one(Counter, [turn(call("inc", n=1)), turn("ok")])
    assert [t for t, m in zip(own.token_ids, own.mask, strict=True) if m].count(end) == 2
    # a turn that ended in another stop token: the template's own end follows with mask 0
    suffix = RENDERER.suffix([*ids("x"), other], [{"role": "user", "content": "go on"}], None)
    assert (
        suffix[0] == end and RENDERER.suffix([*ids("x"), end], [{"role": "user", "content": "go on"}], None)[0] != end
    )


def test_two_calls_in_one_turn_run_in_order():
    episode = play_one(Counter, [turn(call("inc", n=1), call("inc", n=2)), turn("ok")])
    assert results(episode) == ["now 1", "now 3"]
    assert [m["tool_call_id"] for m in episode.messages if m["role"] == "tool"] == [
        o.call.id for o in episode.turns[0].outcomes
    ]
    assert len({o.call.id for o in episode.turns[0].outcomes}) == 2
    assert episode.reward == 3.0 and episode.stop_reason is StopReason.ANSWER


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>\n{"name": "inc", "arguments": {"n": 1,,}}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": 3}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": null}\n</tool_call>',
        '<tool_call>\n{"arguments": {"n": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": {"n": 1, "x": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": {"n": null}}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": {"n": "1"}}\n</tool_call>',
    ],
)
def test_a_call_that_does_not_fit_goes_back_as_text_and_the_episode_goes_on(written):
    episode = play_one(Counter, [turn(written), turn(call("inc", n=5)), turn("ok")])
    first, second = episode.turns[0].outcomes[0], episode.turns[1].outcomes[0]
    assert not first.ok and first.content and second.ok
    assert "inc" in first.content or "JSON" in first.content or "name" in first.content
    assert episode.reward == 5.0, "the refused call must not have changed the state"


def test_arguments_encoded_twice_are_unwrapped():
    written = '<tool_call>\n{"name": "inc", "arguments": "{\\"n\\": 4}"}\n</tool_call>'
    assert play_one(Counter, [turn(written), turn("ok")]).reward == 4.0


@pytest.mark.parametrize(("cap", "runs"), [(1, 0), (2, 1), (4, 3)])
def test_max_turns_is_rounds_of_calls_plus_one(cap, runs):
    """trl's cap of n rounds is n+1 turns, the last one's calls not run; n=0 runs none."""
    episode = play_one(Counter, [turn(call("inc", n=1))] * 8, max_turns=cap)
    assert episode.reward == runs and len(episode.turns) == cap
    assert episode.stop_reason is StopReason.MAX_TURNS and episode.truncated


def test_without_a_cap_an_agent_that_always_calls_still_ends():
    episode = play_one(Counter, lambda *_: turn(call("inc", n=1)), max_completion_length=400)
    assert episode.stop_reason is StopReason.MAX_COMPLETION_LENGTH and episode.truncated
    assert episode.completion_length <= 400
    assert episode.reward == len([o for t in episode.turns for o in t.outcomes])


def test_a_tool_result_that_does_not_fit_counts_and_the_row_stays_within_the_limit():
    class Talker(Counter):
        def inc(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            self.n += n
            return "word " * 2000

    episode = play_one(Talker, [turn(call("inc", n=1))] * 3, max_completion_length=200)
    assert episode.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    assert episode.reward == 1.0 and episode.completion_length <= 200
    full = play_one(
        Talker, [turn(call("inc", n=1))] * 3, max_context=len(episode.token_ids) + 50, max_completion_length=1 << 20
    )
    assert full.stop_reason is StopReason.CONTEXT and full.reward == 1.0


def test_limits_reached_exactly():
    answer = turn(call("inc", n=1))
    episode = play_one(Counter, [answer] * 2, max_completion_length=len(answer))
    assert episode.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    assert episode.completion_length == len(answer) and episode.reward == 1.0
    cut = play_one(Counter, [answer], max_completion_length=len(answer) - 1)
    assert cut.completion_length == len(answer) - 1 and cut.reward == 0.0
    assert cut.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    short = play_one(Counter, [answer], max_turn_tokens=3)
    assert short.stop_reason is StopReason.MAX_TURN_TOKENS and short.completion_length == 3


def test_a_prompt_longer_than_the_context_ends_at_once_with_its_reward():
    episode = play_one(Counter, [turn("x")], max_context=5)
    assert episode.stop_reason is StopReason.CONTEXT and episode.turns == () and episode.reward == 0.0


def test_done_as_attribute_property_and_signal_ends_the_episode():
    class Attribute(Counter):
        def inc(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            self.n += n
            self.done = self.n >= 2
            return "x"

    class Property(Counter):
        @property
        def done(self) -> bool:
            return self.n >= 2

    class Signal(Counter):
        def inc(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            self.n += n
            if self.n >= 2:
                raise EpisodeDone("over")
            return "x"

    for factory in (Attribute, Property, Signal):
        episode = play_one(factory, [turn(call("inc", n=1), call("inc", n=1), call("inc", n=1))])
        assert episode.reward == 2.0, "calls after the end do not run"
        assert episode.stop_reason is StopReason.DONE and not episode.truncated


def test_tools_that_raise_are_the_agents_business_and_environment_failures_are_not():
    class Breaks(Counter):
        def inc(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            if n == 1:
                raise ValueError("no ones")
            raise EnvironmentFailure("power cut")

    episode = play_one(Breaks, [turn(call("inc", n=1)), turn("ok")])
    assert "no ones" in results(episode)[0] and not episode.turns[0].outcomes[0].ok
    with pytest.raises(TooManyFailures, match="power cut"):
        play(Breaks, [turn(call("inc", n=2))], retries=0, siblings=2, max_consecutive_failed_groups=2)


def test_rewards_add_up_and_none_is_unscorable():
    class Pays:
        value: object = {"style": 0.5, "win": 1}

        def reset(self):
            return "go"

        def act(self, n: int) -> ToolResult:
            """Act.

            Args:
                n: Number.
            """
            return ToolResult(f"got {n}", reward=n / 10)

        def get_reward(self):
            return self.value

    episode = play_one(Pays, [turn(call("act", n=1), call("act", n=2)), turn("ok")])
    assert episode.rewards == {"turns": pytest.approx(0.3), "style": 0.5, "win": 1.0}
    assert episode.reward == pytest.approx(1.8) and episode.turns[0].reward == pytest.approx(0.3)

    class Unknown(Pays):
        value = None

    class Known(Pays):
        value = 1.0

    shared = {"n": 0}

    class Sometimes(Pays):
        def __init__(self):
            shared["n"] += 1
            self.number = shared["n"]

        def get_reward(self):
            return None if self.number == 1 else 1.0

        def close(self):
            pass

    group = play(Sometimes, [turn("x")], siblings=3).groups[0]
    assert [e.reward for e in group.episodes].count(None) == 1 and len(group.episodes) == 3


def test_free_text_steps_become_user_messages():
    class Echo:
        def reset(self):
            self.heard = []
            return [{"role": "system", "content": "Talk."}, {"role": "user", "content": "Hi."}]

        def step(self, message):
            self.heard.append(message)
            return StepResult(f"you said {message}", reward=1.0, done=len(self.heard) == 2)

        def get_reward(self):
            return 0.5

    episode = play_one(Echo, [turn("one"), turn("two")])
    assert [m["role"] for m in episode.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert episode.messages[3]["content"] == "you said one"
    assert episode.reward == 2.5 and episode.stop_reason is StopReason.DONE
    text = TOKENIZER.decode(list(episode.token_ids), skip_special_tokens=False)
    assert text + "\n" == RENDERER.render(list(episode.messages[:-1]))


def test_async_members_work_and_a_slow_async_tool_is_stopped_with_a_message():
    class Slow:
        async def reset(self):
            return "go"

        async def wait(self) -> str:
            """Wait."""
            await asyncio.sleep(3600)
            return "never"

        async def get_reward(self):
            return 1.0

    began = time.monotonic()
    episode = play_one(Slow, [turn(call("wait")), turn("ok")], tool_timeout=0.05)
    assert time.monotonic() - began < 60
    assert "too long" in results(episode)[0] and episode.reward == 1.0 and episode.stop_reason is StopReason.ANSWER


def test_a_hung_thread_ends_its_episode_unscored_and_its_instance_is_never_used_again():
    release = []

    class Hangs:
        made = 0

        def __init__(self):
            type(self).made += 1

        def reset(self, seed):
            return "go"

        def wait(self) -> str:
            """Wait."""
            while not release:
                time.sleep(0.01)
            return "x"

        def get_reward(self):
            return 1.0

    with world(Hangs, {f"train/0/{i}/0": [turn(call("wait") if i == 0 else "x")] for i in range(3)},
               tool_timeout=0.1) as (runner, tasks, _):  # fmt: skip
        from envgrad.rollout.group import GroupPolicy

        episodes = runner.play(tasks, 1, GroupPolicy(num_generations=3)).groups[0].episodes
    release.append(1)
    assert [e.reward for e in episodes] == [None, 1.0, 1.0]
    assert episodes[0].stop_reason is StopReason.TOOL_TIMEOUT and episodes[0].truncated


def test_episode_timeout_ends_as_truncated_and_the_reward_stands():
    waits = iter([0.0])  # the second answer never comes
    episode = play_one(
        Counter, lambda *_: turn(call("inc", n=1)), latency=lambda session: next(waits, 3600.0), episode_timeout=4.0
    )
    assert episode.stop_reason is StopReason.EPISODE_TIMEOUT and episode.truncated
    assert episode.reward is not None and episode.reward >= 1


def test_reset_without_a_prompt_names_reset():
    class Silent(Counter):
        def reset(self, seed):
            return None

    with pytest.raises(EnvironmentContractError, match="reset"):
        play(Silent, [turn("x")])


def test_sampling_seeds_differ_between_siblings_and_turns_and_repeat_between_runs():
    seeds = []
    for _ in range(2):
        with world(Counter, [turn(call("inc", n=1)), turn("x")]) as (runner, tasks, sampler):
            from envgrad.rollout.group import GroupPolicy

            runner.play(tasks, 2, GroupPolicy(num_generations=2))
            seeds.append({(r.session.order, r.turn): r.params.seed for r in sampler.requests})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 8
