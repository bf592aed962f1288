"""Known faults of agent-training libraries, on every trainer: what is sampled, what is trained, what ends a run.

The parts have tests of their own; these hold each trainer to the same outcome. A spy reads the optimizer steps' packed
batches, so what is compared is what the loss gets.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from envgrad import StepResult, TooManyFailures
from envgrad.logprobs import policy_logprobs
from helpers.chat_templates import CASES
from helpers.models import Letters, flat, tiny_llama
from helpers.tokenizers import CHATML, bpe_tokenizer
from helpers.trainers import NAMES, Kind, by_sibling, logged, script
from helpers.world import TOKENIZER, call, ids, turn

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


def spy_on(trainer: Any) -> list[Any]:
    """The packed batches of the optimizer steps, as they come to be trained."""
    seen: list[Any] = []
    original = trainer.training_step

    def step(model, inputs, *rest):
        seen.append(inputs.batch)
        return original(model, inputs, *rest)

    trainer.training_step = step
    return seen


def trained(batch: Any) -> list[list[tuple[int, float]]]:
    """Of each trained sample its ``(token id, log-prob)`` pairs, read from the micro-batches."""
    rows = []
    for packed in batch.micro_batches:
        for number in range(packed.num_samples):
            own = packed.sample_index == number
            rows.append(list(zip(packed.target_ids[own].tolist(), packed.sampler_logprobs[own].tolist(), strict=True)))
    return rows


def episodes_of(trainer: Any) -> list[Any]:
    return [episode for group in trainer.last_round.groups for episode in group.episodes]


def threshold(kind: Kind, value: float) -> dict[str, float]:
    """Somebody must count as solved, for the algorithm that learns from the solved ones."""
    return {"success_reward_threshold": value} if kind.name == "SDPO" else {}


# -- tokens


def test_sampled_ids_are_trained_as_they_were_sampled(kind, tmp_path, monkeypatch):
    """``he`` + ``llo`` decodes to a text whose own encoding is one token; both turns are trained as sampled."""
    split = [*ids("he"), *ids("llo")]
    assert ids("hello") != split
    scripts = []
    for n in (1, 2, 3, 4):
        first, second = [*split, *turn(call("inc", n=n))], [*split, *turn()]
        scripts.append([(tokens, [-0.01 * at for at in range(len(tokens))]) for tokens in (first, second)])
    script(monkeypatch, by_sibling(*scripts))
    trainer = kind.make(tmp_path, environment_factory=Counter, options={"max_steps": 1} | threshold(kind, 4.0))
    seen = spy_on(trainer)
    trainer.train()
    expected = [
        [pair for tokens, logprobs in turns for pair in zip(tokens, logprobs, strict=True)] for turns in scripts
    ]
    rows = trained(seen[0])
    assert rows
    for row in rows:
        assert any(_close(row, one) for one in expected), TOKENIZER.decode([token for token, _ in row])


def _close(row: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    return [token for token, _ in row] == [token for token, _ in expected] and all(
        math.isclose(a, b, abs_tol=1e-6) for (_, a), (_, b) in zip(row, expected, strict=True)
    )


def test_a_row_is_the_templates_own_text_with_the_separator_untrained(kind, tmp_path, monkeypatch):
    script(monkeypatch, [turn(call("inc", n=2)), turn("done")])
    trainer = kind.make(tmp_path, environment_factory=Counter, options={"max_steps": 1})
    trainer.train()
    renderer = trainer.rollouts.renderer
    tools = trainer.rollouts.specs["Counter"].tools
    for episode in episodes_of(trainer):
        text = TOKENIZER.decode(list(episode.token_ids), skip_special_tokens=False)
        rendered = renderer.render(list(episode.messages), [tool.schema for tool in tools], generation=False)
        assert text + "\n" == rendered
        end = episode.turns[0].start + episode.turns[0].num_tokens
        assert TOKENIZER.decode([episode.token_ids[end]]) == "\n" and episode.mask[end] == 0


def test_history_that_the_template_rewrites_is_trained_once_in_the_context_it_was_sampled_in(
    kind, tmp_path, monkeypatch
):
    """The template drops reasoning from earlier turns; the row keeps it."""
    tokenizer = bpe_tokenizer(CASES["drops_earlier_thinking"].source)

    def thinking(number: int) -> list[int]:
        return [*ids(f"<think>\nturn {number}\n</think>\n\n"), *turn(call("inc", n=1))]

    samplers = script(monkeypatch, [thinking(0), thinking(1), turn("ok")])
    options = {"max_steps": 1, "max_completion_length": 1024}
    trainer = kind.make(tmp_path, processing_class=tokenizer, environment_factory=Counter, options=options)
    trainer.train()
    for episode in episodes_of(trainer):
        sampled = [token for token, own in zip(episode.token_ids, episode.mask, strict=True) if own]
        assert sampled == [*thinking(0), *thinking(1), *turn("ok")] and episode.reward == 2.0
    for request in samplers[0].requests:  # each turn was sampled behind all that had been sampled before
        assert any(
            tuple(request.prompt_ids) == one.token_ids[: len(request.prompt_ids)] for one in episodes_of(trainer)
        )


def test_an_end_of_turn_that_is_also_the_padding_is_trained(kind, tmp_path, monkeypatch):
    tokenizer = bpe_tokenizer(CHATML, pad="<|im_end|>")
    end = turn()[-1]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == end
    scripts = [[[5, 6, end]], [[5, end]], [[7, 8, 9, end]], [[7, end]]]
    script(monkeypatch, by_sibling(*scripts))

    def judge(completion_ids, **kwargs):
        return [float(len(own)) for own in completion_ids]

    rows = Dataset.from_list([{"prompt": "one"}])
    options = {"max_steps": 1} | threshold(kind, 3.0)
    trainer = kind.make(tmp_path, processing_class=tokenizer, reward_funcs=judge, train_dataset=rows, options=options)
    seen = spy_on(trainer)
    trainer.train()
    assert [sum(episode.mask) for episode in episodes_of(trainer)] == [3, 2, 4, 2]
    for row in trained(seen[0]):
        assert [[token for token, _ in row]] in scripts, "each row ends in its own end of turn, and has no padding"


def test_an_end_of_turn_keeps_its_log_prob_and_its_ratio_is_one(kind, tmp_path):
    """At temperature 0.6, with an unchanged policy: the ratio is 1 on every token, the sampled end of turn included."""
    largest, tokens, ends = 0.0, 0, 0
    options = {"max_steps": 1, "temperature": 0.6, "max_completion_length": 12, "per_device_train_batch_size": 16}
    options |= threshold(kind, 0.3)
    trainer = kind.make(tmp_path, tiny_llama(), environment_factory=Letters, options=options)
    seen = spy_on(trainer)

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            nonlocal largest, tokens, ends
            for packed in seen[-1].micro_batches:
                with torch.no_grad():
                    outputs = policy_logprobs(trainer.model, packed, temperature=0.6, entropy="none")
                ratio = (outputs.logprobs - packed.sampler_logprobs).exp()
                largest = max(largest, float((ratio - 1).abs().max()))
                tokens += len(ratio)
                stops = torch.tensor(trainer.rollouts.renderer.stop_token_ids)
                ends += int(torch.isin(packed.target_ids, stops).sum())

    trainer.add_callback(Compare())
    trainer.train()
    assert tokens > 20 and ends and largest < 1e-4


# -- calls


def test_two_calls_in_one_turn_run_in_order(kind, tmp_path, monkeypatch):
    script(monkeypatch, [turn(call("inc", n=1), call("inc", n=2)), turn("ok")])
    trainer = kind.make(tmp_path, environment_factory=Counter, options={"max_steps": 1})
    trainer.train()
    for episode in episodes_of(trainer):
        results = [message["content"] for message in episode.messages if message["role"] == "tool"]
        assert results == ["now 1", "now 3"] and episode.reward == 3.0


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ('{"name": "inc", "arguments": "{\\"n\\": 4}"}', 4.0),
        ('{"name": "inc", "arguments": 3}', 0.0),
        ('{"name": "inc", "arguments": null}', 0.0),
        ('{"name": "inc", "arguments": {}}', 0.0),
        ('{"name": "inc", "arguments": {"n": 1, "x": 2}}', 0.0),
        ('{"name": "nope", "arguments": {}}', 0.0),
    ],
    ids=["text of an object", "number", "null", "missing", "extra", "unknown"],
)
def test_calls_of_another_shape_change_no_state(kind, tmp_path, monkeypatch, written, reward):
    script(monkeypatch, [[*ids(f"<tool_call>\n{written}\n</tool_call>"), *turn()], turn("ok")])
    trainer = kind.make(tmp_path, environment_factory=Counter, options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "reward") == [reward]
    assert logged(trainer, "tools/failure_frequency") == [0.0 if reward else 1.0]
    outcome = episodes_of(trainer)[0].turns[0].outcomes[0]
    assert len(episodes_of(trainer)[0].turns) == 2, "the episode goes on"
    if not reward:
        assert "inc" in outcome.content, "the text names the tool, or the known ones"


@pytest.mark.parametrize(("cap", "runs"), [(0, 0), (1, 1), (None, None)])
def test_rounds_of_calls_end_at_their_cap_and_without_one_too(kind, tmp_path, monkeypatch, cap, runs):
    script(monkeypatch, lambda *_: turn(call("inc", n=1)))
    options = {"max_steps": 1, "max_completion_length": 300}
    if cap is not None:
        options["max_tool_calling_iterations"] = cap
    trainer = kind.make(tmp_path, environment_factory=Counter, options=options)
    trainer.train()
    for episode in episodes_of(trainer):
        assert episode.truncated
        assert episode.reward == runs if cap is not None else 0 < episode.reward < 300


# -- lengths


class Long:
    """A tool that answers more than any limit."""

    def reset(self, seed):
        return "Ask."

    def ask(self) -> str:
        """Ask."""
        return "much " * 400

    def get_reward(self):
        return 0.5


def test_a_result_beyond_the_budget_ends_the_episode_within_it_and_keeps_its_reward(kind, tmp_path, monkeypatch):
    script(monkeypatch, [turn(call("ask")), turn("done")])
    trainer = kind.make(tmp_path, environment_factory=Long, options={"max_steps": 1, "max_completion_length": 64})
    trainer.train()
    for episode in episodes_of(trainer):
        assert episode.truncated and episode.reward == 0.5 and episode.completion_length <= 64


def test_a_budget_that_is_reached_exactly(kind, tmp_path, monkeypatch):
    answer = turn(call("inc", n=1))
    script(monkeypatch, [answer] * 2)
    options = {"max_steps": 1, "max_completion_length": len(answer)}
    trainer = kind.make(tmp_path, environment_factory=Counter, options=options)
    trainer.train()
    for episode in episodes_of(trainer):
        assert episode.completion_length == len(answer) and episode.reward == 1.0 and episode.truncated


def test_a_prompt_beyond_the_context_ends_the_episode_at_once(kind, tmp_path):
    class Endless(Letters):
        def reset(self, seed):
            return "x" * 20000

    trainer = kind.make(tmp_path, tiny_llama(), environment_factory=Endless, options={"max_steps": 1})
    trainer.train()
    assert {str(episode.stop_reason) for episode in episodes_of(trainer)} == {"context"}
    assert not any(episode.num_sampled_tokens for episode in episodes_of(trainer))


# -- updates


def test_an_update_does_not_depend_on_how_the_step_is_cut(kind, tmp_path, monkeypatch):
    """Eight rows of one length: at once, in four parts, and as half of a round; plain SGD."""

    def judge(completion_ids, **kwargs):
        return [float(own[0] % 3) for own in completion_ids]

    end, updates = turn()[-1], []
    for changes in (
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
    ):
        script(monkeypatch, by_sibling(*[[([5 + sibling, 6, 7, end], [-5.8] * 4)] for sibling in range(4)]))
        model = tiny_llama()
        before = flat(model)
        options = {"num_generations": 4, "max_steps": 1, "learning_rate": 0.1, "optim": "sgd"} | threshold(kind, 2.0)
        trainer = kind.make(
            tmp_path, model, reward_funcs=judge, train_dataset=Dataset.from_list([{"prompt": "one"}]),
            options=options | changes,
        )  # fmt: skip
        trainer.train()
        updates.append(flat(trainer.model) - before)
    assert updates[0].abs().max() > 1e-5
    for other in updates[1:]:
        torch.testing.assert_close(other, updates[0], rtol=0, atol=1e-6)


def test_all_truncated_and_masked_is_finite_and_moves_nothing(kind, tmp_path):
    class Endless(Letters):
        def step(self, message):
            return StepResult("go on", reward=float(len(message) % 3))

    options = {"max_steps": 2, "max_completion_length": 12, "mask_truncated_completions": True}
    options |= {"beta": 0.0} if kind.name == "RLOO" else {}
    trainer = kind.make(tmp_path, tiny_llama(), environment_factory=Endless, options=options)
    before = flat(trainer.model)
    trainer.train()
    assert all(episode.truncated for episode in episodes_of(trainer))
    assert torch.equal(before, flat(trainer.model)) and logged(trainer, "loss") == [0.0, 0.0]


# -- life


class Door(Letters):
    """Counts what is opened and closed."""

    opened: list[int]
    closed: list[int]

    def __init__(self):
        self.opened.append(id(self))

    def close(self):
        self.closed.append(id(self))


@pytest.fixture
def door() -> Iterator[type[Door]]:
    Door.opened, Door.closed = [], []
    kept = []

    class Kept(Door):  # so that no number of one that is gone is given to another
        def __init__(self):
            kept.append(self)
            super().__init__()

    yield Kept


@pytest.mark.parametrize("way_out", ["the end", "an error", "an interrupt"])
def test_every_environment_is_closed_once_on_every_way_out(kind, tmp_path, door, way_out):
    class Leaves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if way_out == "an error":
                raise ZeroDivisionError("by hand")
            if way_out == "an interrupt":
                raise KeyboardInterrupt

    trainer = kind.make(
        tmp_path, tiny_llama(), environment_factory=door, callbacks=[Leaves()], options={"max_completion_length": 8}
    )
    expected = {"an error": ZeroDivisionError, "an interrupt": KeyboardInterrupt}.get(way_out)
    if expected is None:
        trainer.train()
    else:
        with pytest.raises(expected):
            trainer.train()
    assert len(door.opened) >= 4 and sorted(door.opened) == sorted(door.closed)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("envgrad-r")]


def test_an_environment_that_breaks_ends_the_run_with_its_own_error_in_seconds(kind, tmp_path):
    class Breaks(Letters):
        rollouts = 0

        def reset(self, seed):
            Breaks.rollouts += 1
            if Breaks.rollouts >= 3:
                raise OSError("the disk is gone")
            return super().reset(seed)

    options = {"max_steps": 500, "max_consecutive_failed_groups": 2, "max_episode_retries": 0}
    trainer = kind.make(tmp_path, tiny_llama(), environment_factory=Breaks, options=options)
    began = time.monotonic()
    with pytest.raises(TooManyFailures, match="the disk is gone") as found:
        trainer.train()
    assert time.monotonic() - began < 60
    error: BaseException | None = found.value
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    assert isinstance(error, OSError)


def test_a_resumed_run_gives_each_group_one_task_and_repeats_none(kind, tmp_path):
    """The environment draws by itself; the tasks of a resumed run are those that the whole one draws."""
    drawn: list[tuple[int, int]] = []

    class Draws(Letters):
        def reset(self, seed, group_id):
            drawn.append((group_id, seed))
            return super().reset(seed)

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 8}
    options |= {"per_device_train_batch_size": 8, "deterministic": True} | threshold(kind, 0.3)

    def run(resume: str | None) -> list[tuple[int, int]]:
        drawn.clear()
        kind.make(tmp_path, tiny_llama(), environment_factory=Draws, options=options).train(
            resume_from_checkpoint=resume
        )
        assert len({group for group, _ in drawn}) == len(set(drawn)), "one task inside each group"
        return list(dict.fromkeys(sorted(drawn, key=drawn.index)))

    whole = run(None)
    assert len(whole) == 8 and run(str(tmp_path / "checkpoint-2")) == whole[4:]
