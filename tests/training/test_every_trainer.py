"""What people rely on, on every trainer: data, rewards, tools, groups and failures mean the same in each."""

from __future__ import annotations

import asyncio
import math
import random
import time

import pytest
import torch
from datasets import Dataset, IterableDataset

from envgrad import ConfigurationError, EnvironmentContractError, TooManyFailures
from helpers.models import Letters, flat, tiny_llama, tokenizer_of
from helpers.trainers import NAMES, Kind, by_sibling, logged, script
from helpers.world import call, ids, turn

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=NAMES)
def kind(request):
    return Kind(request.param)


class Counter:
    """``inc`` adds up; the reward is the sum."""

    def reset(self, seed):
        self.n = 0
        return "Count."

    def inc(self, n: int) -> str:
        """
        Add.

        Args:
            n: How much.
        """
        self.n += n
        return f"now {self.n}"

    def get_reward(self):
        return float(self.n)


def paid_by_length(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


ANSWER = [turn("hello")]


# -- data


def test_an_environment_alone_trains_and_moves_the_weights(kind, tmp_path):
    options = {"max_steps": 5, "max_completion_length": 12}
    if kind.name == "SDPO":  # somebody must count as solved
        options["success_reward_threshold"] = 0.3
    trainer = kind.make(tmp_path, tiny_llama(), environment_factory=Letters, options=options)
    before = flat(trainer.model)
    assert trainer.train().global_step == 5
    assert not torch.equal(before, flat(trainer.model)), "the weights must move"


def test_the_observation_of_reset_is_in_the_prompt(kind, tmp_path, monkeypatch):
    class Seven(Counter):
        def reset(self, seed):
            super().reset(seed)
            return "TASK 7"

    samplers = script(monkeypatch, [turn(call("inc", n=1)), *ANSWER])
    trainer = kind.make(tmp_path, environment_factory=Seven)
    trainer.train()
    asked = tokenizer_of().decode(samplers[0].requests[0].prompt_ids)
    assert "TASK 7" in asked
    assert logged(trainer, "reward") == [1.0, 1.0]


def test_an_observation_is_glued_to_the_rows_prompt(kind, tmp_path, monkeypatch):
    class Glued(Counter):
        def reset(self, seed, secret):
            super().reset(seed)
            return f" The secret is {secret}."

    samplers = script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Begin."}], "secret": 42}])
    trainer = kind.make(tmp_path, train_dataset=rows, environment_factory=Glued, options={"max_steps": 1})
    trainer.train()
    assert "Begin. The secret is 42." in tokenizer_of().decode(samplers[0].requests[0].prompt_ids)


def test_rows_without_a_prompt_feed_the_environment(kind, tmp_path, monkeypatch):
    seen = []

    class Fed(Counter):
        def reset(self, word):
            seen.append(word)
            self.n = 0
            return word

    script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"word": word} for word in ("red", "blue", "green")])
    options = {"max_steps": -1, "num_train_epochs": 2}
    trainer = kind.make(tmp_path, train_dataset=rows, environment_factory=Fed, options=options)
    trainer.train()
    assert sorted(seen) == sorted(["red", "blue", "green"] * 2 * 4)
    assert trainer.state.epoch == 2


@pytest.mark.parametrize("conversational", [True, False])
def test_prompts_and_a_reward_function_need_no_environment(kind, tmp_path, monkeypatch, conversational):
    got = {}

    def spy(prompts, completions, completion_ids, answer, **kwargs):
        got.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer, kwargs=set(kwargs))
        return [float(index) for index in range(len(prompts))]

    samplers = script(monkeypatch, ANSWER)
    prompt = [{"role": "user", "content": "Say hello."}] if conversational else "Say hello"
    rows = Dataset.from_list([{"prompt": prompt, "answer": "hello"}])
    trainer = kind.make(tmp_path, reward_funcs=spy, train_dataset=rows, options={"max_steps": 1})
    before = flat(trainer.model)
    trainer.train()
    assert got["answer"] == ["hello"] * 4 and got["ids"] == [ANSWER[0]] * 4
    assert got["kwargs"] == {"trainer_state", "log_metric", "log_extra"}
    text = tokenizer_of().decode(samplers[0].requests[0].prompt_ids)
    if conversational:
        assert got["prompts"] == [prompt] * 4 and got["completions"][0] == [{"role": "assistant", "content": "hello"}]
        assert text.startswith("<|im_start|>")
    else:
        assert got["prompts"] == ["Say hello"] * 4 and got["completions"] == ["hello"] * 4
        assert text == "Say hello"
    assert logged(trainer, "rewards/spy/mean") == [1.5] and logged(trainer, "reward") == [1.5]
    assert not torch.equal(before, flat(trainer.model))


def test_a_stream_of_prompts_needs_max_steps_and_then_trains(kind, tmp_path, monkeypatch):
    script(monkeypatch, ANSWER)
    rows = IterableDataset.from_generator(lambda: ({"prompt": f"number {n}"} for n in range(3)))
    with pytest.raises(ConfigurationError, match="max_steps"):
        kind.make(tmp_path, reward_funcs=paid_by_length, train_dataset=rows, options={"max_steps": -1})
    seen = []

    def spy(prompts, **kwargs):
        seen.append(prompts[0])
        return [1.0] * len(prompts)

    trainer = kind.make(tmp_path, reward_funcs=spy, train_dataset=rows, options={"max_steps": 4})
    trainer.train()
    assert seen == ["number 0", "number 1", "number 2", "number 0"]


def test_a_row_of_a_stream_without_prompt_stops_before_anything_is_sampled(kind, tmp_path, monkeypatch):
    samplers = script(monkeypatch, ANSWER)
    rows = IterableDataset.from_generator(lambda: ({"text": f"{n}"} for n in range(3)))
    with pytest.raises(KeyError, match="prompt"):
        trainer = kind.make(tmp_path, reward_funcs=paid_by_length, train_dataset=rows)
        trainer.train()
    assert not samplers or not samplers[0].requests


def test_a_dataset_routes_rows_and_shows_only_that_environments_tools(kind, tmp_path, monkeypatch):
    class OnlyDec:
        def reset(self):
            return "Down."

        def dec(self, n: int) -> str:
            """Subtract.

            Args:
                n: How much.
            """
            return "less"

        def get_reward(self):
            return 0.0

    samplers = script(monkeypatch, [turn(call("inc", n=1)), *ANSWER])
    rows = Dataset.from_list([{"environment": "up"}, {"environment": "down"}])
    trainer = kind.make(
        tmp_path, train_dataset=rows, environment_factory={"up": Counter, "down": OnlyDec},
        options={"per_device_train_batch_size": 8, "max_steps": 1},
    )  # fmt: skip
    trainer.train()
    for request in samplers[0].requests:
        text = tokenizer_of().decode(request.prompt_ids)
        assert ('"name": "inc"' in text.split("<|im_start|>user")[0]) == ("Count." in text)
        assert ('"name": "dec"' in text.split("<|im_start|>user")[0]) == ("Down." in text)
    assert logged(trainer, "reward/up") == [1.0] and logged(trainer, "reward/down") == [0.0]


def test_environments_that_share_a_task_column_see_their_own_rows_only(kind, tmp_path, monkeypatch):
    seen = {"up": [], "down": []}

    class Up(Counter):
        def reset(self, task):
            super().reset(0)
            seen["up"].append(task)
            return f"Up {task}."

    class Down(Counter):
        def reset(self, task):
            super().reset(0)
            seen["down"].append(task)
            return f"Down {task}."

    samplers = script(monkeypatch, ANSWER)
    rows = [{"environment": name, "task": f"{name}-{n}"} for n in range(2) for name in seen]
    trainer = kind.make(
        tmp_path, train_dataset=Dataset.from_list(rows), environment_factory={"up": Up, "down": Down},
        options={"max_steps": -1, "num_train_epochs": 1},
    )  # fmt: skip
    trainer.train()
    assert {name: sorted(tasks) for name, tasks in seen.items()} == {
        name: sorted([f"{name}-0", f"{name}-1"] * 4) for name in seen
    }
    asked = [tokenizer_of().decode(request.prompt_ids) for request in samplers[0].requests]
    assert sum("Up up-" in text for text in asked) == sum("Down down-" in text for text in asked) == 8


@pytest.mark.parametrize(
    ("names", "words"),
    [(["up", "dwon"], ["row 1", "dwon", "up, down"]), (["up", None], ["row 1", "None", "up, down"])],
)
def test_an_unknown_environment_is_found_over_the_whole_column_at_construction(kind, tmp_path, names, words):
    rows = Dataset.from_list([{"environment": name} for name in names])
    with pytest.raises(ConfigurationError) as found:
        kind.make(tmp_path, train_dataset=rows, environment_factory={"up": Counter, "down": Counter})
    assert all(word in str(found.value) for word in words), found.value


def test_two_names_of_one_class_share_nothing_but_the_class(kind, tmp_path, monkeypatch):
    """Each pays by the factory that made it, so an instance that played for the other name would show."""

    class Paid(Counter):
        def __init__(self, pay):
            self.pay = pay

        def get_reward(self):
            return self.pay * self.n

    script(monkeypatch, [turn(call("inc", n=2)), *ANSWER])
    trainer = kind.make(
        tmp_path, environment_factory={"a": lambda: Paid(1.0), "b": lambda: Paid(10.0)},
        options={"per_device_train_batch_size": 8, "max_steps": 2},
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "episodes/a") == [4.0] * 2 and logged(trainer, "episodes/b") == [4.0] * 2
    assert logged(trainer, "reward/a") == [2.0] * 2 and logged(trainer, "reward/b") == [20.0] * 2


def test_evaluation_plays_the_rows_of_its_dataset(kind, tmp_path, monkeypatch):
    script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"prompt": "one"}])
    held = Dataset.from_list([{"prompt": "two"}, {"prompt": "three"}])
    seen = set()

    def spy(prompts, **kwargs):
        seen.update(prompts)
        return [2.0] * len(prompts)

    trainer = kind.make(tmp_path, reward_funcs=spy, train_dataset=rows, eval_dataset={"held": held})
    metrics = trainer.evaluate()
    assert seen == {"two", "three"} and metrics["eval_held_reward"] == 2.0
    trainer.close()


# -- rewards


def test_the_environments_reward_stands_beside_reward_functions(kind, tmp_path, monkeypatch):
    def half(completions, environments, **kwargs):
        assert all(isinstance(environment, Counter) for environment in environments)
        return [float(environment.n) for environment in environments]

    script(monkeypatch, by_sibling(*[[turn(call("inc", n=n)), *ANSWER] for n in (1, 2, 3, 4)]))
    weights = [0.5]
    functions = [half]
    trainer = kind.make(
        tmp_path,
        reward_funcs=functions,
        environment_factory=Counter,
        options={"reward_weights": weights, "max_steps": 1},
    )
    trainer.train()
    assert logged(trainer, "rewards/half/mean") == [2.5] and logged(trainer, "rewards/Counter/mean") == [2.5]
    assert logged(trainer, "reward") == [2.5 + 0.5 * 2.5]
    assert weights == [0.5] and functions == [half], "the user's lists stay as they are"


def test_weights_by_name_cover_environments_and_components(kind, tmp_path, monkeypatch):
    class Parts(Counter):
        def get_reward(self):
            return {"sum": float(self.n), "style": 1.0}

    script(monkeypatch, [turn(call("inc", n=3)), *ANSWER])
    options = {"reward_weights": {"style": 10.0}, "max_steps": 1}
    trainer = kind.make(tmp_path, environment_factory=Parts, options=options)
    trainer.train()
    assert logged(trainer, "reward") == [13.0] and logged(trainer, "rewards/style/mean") == [1.0]


def test_one_environment_scores_itself_and_the_other_leaves_it_to_a_function(kind, tmp_path, monkeypatch):
    class Silent:
        def reset(self):
            return "Say."

        def say(self) -> str:
            """Say."""
            return "said"

    def judge(completions, environments, **kwargs):
        return [5.0 if isinstance(environment, Silent) else None for environment in environments]

    script(monkeypatch, [turn(call("inc", n=1)), *ANSWER])
    trainer = kind.make(
        tmp_path, reward_funcs=judge, environment_factory={"counts": Counter, "silent": Silent},
        options={"per_device_train_batch_size": 8, "max_steps": 1},
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "reward/counts") == [1.0] and logged(trainer, "reward/silent") == [5.0]


@pytest.mark.parametrize("given", [[1.0], [1.0] * 3, 1.0, "1234"])
def test_a_reward_list_of_the_wrong_length_names_the_function_and_both_counts(kind, tmp_path, monkeypatch, given):
    def short(completions, **kwargs):
        return given

    script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"prompt": "one"}])
    trainer = kind.make(tmp_path, reward_funcs=short, train_dataset=rows)
    with pytest.raises(ConfigurationError, match=r"short.*") as found:
        trainer.train()
    assert "4" in str(found.value)
    if isinstance(given, list):
        assert f"returned {len(given)} rewards" in str(found.value)


@pytest.mark.parametrize("nothing", [None, float("nan")])
def test_an_unscorable_episode_is_no_part_of_the_baseline(kind, tmp_path, monkeypatch, nothing):
    def some(completions, **kwargs):
        return [1.0, nothing, 0.0, 1.0]

    script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"prompt": "one"}])
    trainer = kind.make(tmp_path, reward_funcs=some, train_dataset=rows, options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "reward")[0] == pytest.approx(2 / 3) and logged(trainer, "episodes/unscored") == [1.0]
    samples = trainer.algorithm.credit(trainer.last_round.groups, *_reference(trainer))
    assert len(samples) == 3 and all(sample.episode.sibling != 1 for sample in samples)
    assert sum(sample.advantages[-1] for sample in samples) == pytest.approx(0.0, abs=0.2)


def _reference(trainer):
    if not trainer.algorithm.credit_reads_reference:
        return ()
    return (trainer.preparation.reference_logprobs(trainer.last_round.groups, "shared", None),)


@pytest.mark.parametrize("dropping", [False, True])
def test_equal_rewards_teach_nothing_and_break_nothing(kind, tmp_path, monkeypatch, caplog, dropping):
    def constant(completions, **kwargs):
        return [1.0] * len(completions)

    script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"prompt": "one"}])
    options = {"max_steps": 3, "per_device_train_batch_size": 8, "dynamic_sampling": dropping}
    options |= {"beta": 0.0} if kind.name == "RLOO" else {}
    trainer = kind.make(tmp_path, reward_funcs=constant, train_dataset=rows, options=options)
    before = flat(trainer.model)
    trainer.train()
    assert logged(trainer, "frac_reward_zero_std") == [1.0] * 3
    if kind.name != "SDPO":  # a solved sibling teaches even where all are solved
        assert logged(trainer, "loss") == [0.0] * 3 and torch.equal(before, flat(trainer.model))
        assert sum("teaches nothing" in record.getMessage() for record in caplog.records) == 1, "told once"
    assert torch.isfinite(flat(trainer.model)).all()
    told = [(name, value) for entry in trainer.state.log_history for name, value in entry.items()]
    assert [pair for pair in told if isinstance(pair[1], int | float) and not math.isfinite(pair[1])] == []


def test_what_reward_functions_log_is_averaged_and_kept(kind, tmp_path, monkeypatch):
    async def talkative(completions, log_metric, log_extra, **kwargs):
        await asyncio.sleep(0)
        log_metric("words", 3.0)
        log_metric("words", 5.0)
        log_extra("note", [f"n{index}" for index in range(len(completions))])
        return [0.0, 1.0, 0.0, 1.0]

    script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"prompt": "one"}])
    trainer = kind.make(tmp_path, reward_funcs=talkative, train_dataset=rows, options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "words") == [4.0]
    records = list(trainer.episode_log.read())
    assert [record["extras"]["note"] for record in records] == ["n0", "n1", "n2", "n3"]


# -- tools


def test_call_and_failure_frequencies(kind, tmp_path, monkeypatch):
    """A good call, an unknown tool, and no call in three episodes: 2/3 calls an episode, of which 1/2 failed."""
    good, unknown, none = [turn(call("inc", n=1)), *ANSWER], [turn(call("nope")), *ANSWER], ANSWER
    script(monkeypatch, by_sibling(good, unknown, none))
    options = {"per_device_train_batch_size": 3, "num_generations": 3, "max_steps": 1}
    trainer = kind.make(tmp_path, environment_factory=Counter, options=options)
    trainer.train()
    assert logged(trainer, "tools/call_frequency")[0] == pytest.approx(2 / 3)
    assert logged(trainer, "tools/failure_frequency") == [0.5]
    assert logged(trainer, "tools/inc/call_frequency")[0] == pytest.approx(1 / 3)
    assert logged(trainer, "tools/inc/failure_frequency") == [0.0]


def test_functions_are_tools_without_an_environment_and_beside_one(kind, tmp_path, monkeypatch):
    calls = []

    def double(n: int) -> int:
        """Double.

        Args:
            n: A number.
        """
        calls.append(n)
        return 2 * n

    samplers = script(monkeypatch, [turn(call("double", n=4)), *ANSWER])
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Double 4."}]}])
    trainer = kind.make(
        tmp_path, reward_funcs=paid_by_length, train_dataset=rows, tools=[double], options={"max_steps": 1}
    )
    trainer.train()
    assert calls == [4] * 4 and "8" in tokenizer_of().decode(samplers[0].requests[-1].prompt_ids)
    script(monkeypatch, [turn(call("double", n=1), call("inc", n=2)), *ANSWER])
    trainer = kind.make(tmp_path, environment_factory=Counter, tools=[double], options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "reward") == [2.0] and calls == [4] * 4 + [1] * 4


def test_async_tools_and_rewards_run(kind, tmp_path, monkeypatch):
    class Async(Counter):
        async def inc(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            await asyncio.sleep(0.001)
            self.n += n
            return "added"

        async def get_reward(self):
            await asyncio.sleep(0)
            return float(self.n)

    script(monkeypatch, [turn(call("inc", n=2), call("inc", n=1)), *ANSWER])
    trainer = kind.make(tmp_path, environment_factory=Async, options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "reward") == [3.0]


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>\n{"name": "inc", "arguments": {"n": 1,,}}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"arguments": {"n": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "inc", "arguments": {"n": null}}\n</tool_call>',
        "<tool_call>\n3\n</tool_call>",
    ],
)
def test_malformed_calls_come_back_as_text_and_crash_nothing(kind, tmp_path, monkeypatch, written):
    samplers = script(monkeypatch, [[*ids(written), *ids("<|im_end|>")], *ANSWER])
    trainer = kind.make(tmp_path, environment_factory=Counter, options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "tools/failure_frequency") == [1.0] and len(samplers[0].requests) == 8
    assert logged(trainer, "reward") == [0.0]


def test_text_blocks_of_a_tool_are_kept_and_images_refused(kind, tmp_path, monkeypatch):
    class Shows(Counter):
        def look(self, image: bool) -> list:
            """Look.

            Args:
                image: Whether to see.
            """
            text = {"type": "text", "text": "a red door"}
            return [text, {"type": "image", "image": "..."}] if image else [text]

    samplers = script(monkeypatch, [turn(call("look", image=False)), turn(call("look", image=True)), *ANSWER])
    trainer = kind.make(tmp_path, environment_factory=Shows, options={"max_steps": 1})
    trainer.train()
    last = tokenizer_of().decode(samplers[0].requests[-1].prompt_ids)
    assert "a red door" in last and "only text" in last


# -- groups


def test_one_task_inside_a_group_and_different_ones_across(kind, tmp_path, monkeypatch):
    class Draws:
        """Draws a task of its own on every reset, and knows nothing of groups."""

        def reset(self):
            self.task = random.randrange(10**9)
            return "Go."

        def act(self) -> str:
            """Act."""
            return "done"

        def get_reward(self):
            return float(self.task % 997)

    script(monkeypatch, ANSWER)
    trainer = kind.make(
        tmp_path, environment_factory=Draws,
        options={"per_device_train_batch_size": 12, "max_steps": 1} | ({"beta": 0.0} if kind.name == "RLOO" else {}),
    )  # fmt: skip
    trainer.train()
    rewards = [[episode.reward for episode in group.episodes] for group in trainer.last_round.groups]
    assert all(len(set(group)) == 1 for group in rewards) and len({group[0] for group in rewards}) == 3
    samples = trainer.algorithm.credit(trainer.last_round.groups, *_reference(trainer))
    assert not any(value for sample in samples for value in sample.advantages)


def test_a_resumed_run_keeps_one_task_inside_a_group(kind, tmp_path, monkeypatch):
    """Within a round of two steps: its second step is in the checkpoint, and the next round is played anew."""

    class Draws:
        def reset(self):
            self.task = random.randrange(10**9)
            return "Go."

        def get_reward(self):
            return float(self.task)

        def act(self) -> str:
            """Act."""
            return "done"

    script(monkeypatch, ANSWER)
    played = []
    for steps in (1, 4):
        options = {
            "per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": steps, "save_strategy": "steps",
            "save_steps": 1, "deterministic": True,
        } | ({"beta": 0.0} if kind.name == "RLOO" else {})  # fmt: skip
        trainer = kind.make(tmp_path, environment_factory=Draws, options=options)
        trainer.train(resume_from_checkpoint=steps > 1)
        played += trainer.last_round.groups
    assert trainer.state.global_step == 4 and len(played) == 8
    tasks = [{episode.reward for episode in group.episodes} for group in played]
    assert all(len(task) == 1 for task in tasks), "one inside each group"
    assert len(set.union(*tasks)) == 8, "another in each"


# -- failures


def test_a_failing_tool_is_the_agents_business_and_the_others_train(kind, tmp_path, monkeypatch):
    class Touchy(Counter):
        def inc(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            if n == 13:
                raise RuntimeError("unlucky")
            return super().inc(n)

    script(monkeypatch, by_sibling(*[[turn(call("inc", n=n)), *ANSWER] for n in (1, 13, 2, 3)]))
    trainer = kind.make(tmp_path, environment_factory=Touchy, options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "reward") == [1.5] and logged(trainer, "tools/failure_frequency") == [0.25]
    text = [
        outcome.content for episode in trainer.last_round.groups[0].episodes for outcome in episode.turns[0].outcomes
    ]
    assert any("unlucky" in content for content in text)


def test_a_hanging_tool_ends_in_seconds(kind, tmp_path, monkeypatch):
    class Hangs(Counter):
        async def inc(self, n: int) -> str:
            """Add.

            Args:
                n: How much.
            """
            if n == 13:
                await asyncio.sleep(3600)
            self.n += n
            return "added"

    script(monkeypatch, by_sibling(*[[turn(call("inc", n=n)), *ANSWER] for n in (1, 13, 2, 3)]))
    trainer = kind.make(tmp_path, environment_factory=Hangs, options={"max_steps": 1, "tool_timeout": 0.3})
    began = time.monotonic()
    trainer.train()
    assert time.monotonic() - began < 60, "of a tool that sleeps for an hour"
    outcomes = [episode.turns[0].outcomes[0] for episode in trainer.last_round.groups[0].episodes]
    assert [outcome.ok for outcome in outcomes] == [True, False, True, True] and "too long" in outcomes[1].content


def test_a_reward_function_that_always_fails_stops_the_run_with_its_error(kind, tmp_path, monkeypatch):
    def broken(completions, **kwargs):
        raise ZeroDivisionError("by hand")

    script(monkeypatch, ANSWER)
    rows = Dataset.from_list([{"prompt": "one"}])
    options = {"max_consecutive_failed_groups": 3}
    trainer = kind.make(tmp_path, reward_funcs=broken, train_dataset=rows, options=options)
    with pytest.raises(TooManyFailures, match="broken") as found:
        trainer.train()
    causes, error = [], found.value
    while error is not None:
        causes.append(type(error))
        error = error.__cause__
    assert ZeroDivisionError in causes


def test_instances_are_as_many_as_episodes_in_flight(kind, tmp_path, monkeypatch):
    alive, peak = set(), []

    class Alive(Counter):
        def __init__(self):
            alive.add(self)
            peak.append(len(alive))

        def close(self):
            alive.discard(self)

    script(monkeypatch, by_sibling(*[[turn(call("inc", n=n)), turn("done")] for n in range(4)]), latency=0.002)
    options = {"max_steps": 2, "per_device_train_batch_size": 24, "max_concurrent_episodes": 8}
    kind.make(tmp_path, environment_factory=Alive, options=options).train()
    assert 4 <= max(peak) <= 8 and not alive


# -- rollout_func


def test_a_users_own_rollouts_train(kind, tmp_path):
    seen = []

    def rollouts(prompts, trainer):
        answers = trainer.generate(prompts, max_tokens=6)
        return {
            "prompt_ids": [answer.prompt_ids for answer in answers],
            "completion_ids": [answer.completion_ids for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
            "bonus": [float(index) for index in range(len(prompts))],
        }

    def pays(completions, bonus, **kwargs):
        seen.append(bonus)
        return bonus

    rows = Dataset.from_list([{"prompt": "Say"}, {"prompt": "Tell"}])
    trainer = kind.make(tmp_path, reward_funcs=pays, train_dataset=rows, rollout_func=rollouts)
    before = flat(trainer.model)
    trainer.train()
    assert seen == [[0.0, 1.0, 2.0, 3.0]] * 2 and not torch.equal(before, flat(trainer.model))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"prompt_ids": [[1]] * 4, "completion_ids": [[2]] * 4}, ["logprobs"]),
        ({"prompt_ids": [[1]] * 4, "completion_ids": [[2]] * 3, "logprobs": [[0.0]] * 4}, ["completion_ids", "3", "4"]),
        ({"prompt_ids": [[1]] * 4, "completion_ids": [[2]] * 4, "logprobs": [[0.0, 0.0]] * 4}, ["rollout 0", "2 logp"]),
        ([1, 2], ["list", "dict"]),
    ],
)
def test_rollouts_that_cannot_be_read_are_named(kind, tmp_path, output, words):
    rows = Dataset.from_list([{"prompt": "Say"}])
    trainer = kind.make(
        tmp_path, reward_funcs=paid_by_length, train_dataset=rows, rollout_func=lambda prompts, trainer: output
    )
    with pytest.raises(ConfigurationError) as found:
        trainer.train()
    assert all(word in str(found.value) for word in words), found.value


def test_own_rollouts_that_fail_are_counted(kind, tmp_path):
    calls = []

    def rollouts(prompts, trainer):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("no answer")
        answers = trainer.generate(prompts, max_tokens=6)
        return {
            "prompt_ids": [answer.prompt_ids for answer in answers],
            "completion_ids": [answer.completion_ids for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
        }

    def pays(completions, **kwargs):
        return [float(index) for index in range(len(completions))]

    rows = Dataset.from_list([{"prompt": "Say"}, {"prompt": "Tell"}])
    trainer = kind.make(tmp_path, reward_funcs=pays, train_dataset=rows, rollout_func=rollouts)
    trainer.train()
    assert sum(logged(trainer, "faults/environment")) == 1.0 == logged(trainer, "run/faults/environment")[-1]
    assert sum(logged(trainer, "failures/environment")) == 4.0


# -- construction

PROMPTS = Dataset.from_list([{"prompt": "one"}])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ConfigurationError, ["environment_factory", "train_dataset"]),
        ({"train_dataset": PROMPTS}, ConfigurationError, ["reward_funcs", "get_reward"]),
        ({"train_dataset": PROMPTS, "reward_funcs": []}, ConfigurationError, ["reward_funcs"]),
        (
            {"train_dataset": Dataset.from_list([{"text": "x"}]), "reward_funcs": paid_by_length},
            KeyError,
            ["prompt", "text"],
        ),
        (
            {"train_dataset": Dataset.from_list([{"seed": 3}]), "environment_factory": Counter},
            ConfigurationError,
            ["seed", "rename"],
        ),
        (
            {"train_dataset": PROMPTS, "environment_factory": {"a": Counter, "b": Counter}},
            ConfigurationError,
            ["environment", "a, b"],
        ),
        (
            {"train_dataset": Dataset.from_list([{"prompt": "x", "image": "y"}]), "reward_funcs": paid_by_length},
            ConfigurationError,
            ["image", "text only"],
        ),
        (
            {"environment_factory": Counter, "rollout_func": lambda prompts, trainer: {}},
            ConfigurationError,
            ["rollout_func", "environment_factory"],
        ),
        ({"environment_factory": Letters, "tools": [paid_by_length]}, EnvironmentContractError, ["completions"]),
        ({"environment_factory": Counter, "reward_funcs": 3}, ConfigurationError, ["3"]),
        ({"train_dataset": {"train": PROMPTS}, "reward_funcs": paid_by_length}, ConfigurationError, ["split"]),
    ],
)
def test_what_cannot_work_is_refused_at_construction(kind, tmp_path, given, error, words):
    with pytest.raises(error) as found:
        kind.make(tmp_path, **given)
    assert all(word in str(found.value) for word in words), found.value


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ({"environment_factory": Counter}, {"max_steps": -1}, ["max_steps", "num_tasks"]),
        (
            {"train_dataset": PROMPTS, "reward_funcs": paid_by_length},
            {"eval_strategy": "steps", "eval_steps": 1},
            ["eval_dataset"],
        ),
        (
            {"train_dataset": PROMPTS, "reward_funcs": paid_by_length},
            {"reward_weights": [1.0, 2.0]},
            ["2", "1", "reward_weights"],
        ),
        ({"environment_factory": Counter}, {"reward_weights": {"Counter": float("nan")}}, ["Counter", "nan"]),
    ],
)
def test_options_that_cannot_work_are_refused_at_construction(kind, tmp_path, given, options, words):
    with pytest.raises(ConfigurationError) as found:
        kind.make(tmp_path, options=options, **given)
    assert all(word in str(found.value) for word in words), found.value
