"""More of what every trainer does alike: epochs, reward models, group and turn rewards, evaluation, logs, resuming."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import nn

from envgrad import ConfigurationError, StepResult
from helpers.models import flat, tiny_llama, tokenizer_of
from helpers.trainers import NAMES, Kind, by_sibling, logged, script
from helpers.world import turn

pytestmark = pytest.mark.filterwarnings("ignore")

ANSWER = [turn("hello")]
TRL_KEYS = {
    "reward", "reward_std", "frac_reward_zero_std", "rewards/judge/mean", "rewards/judge/std",
    "num_tokens", "step_time",
    "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
    "completions/mean_terminated_length", "completions/min_terminated_length", "completions/max_terminated_length",
    "tools/call_frequency", "tools/failure_frequency", "entropy", "loss", "grad_norm", "learning_rate", "epoch",
}  # fmt: skip
CLIP_KEYS = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}


class Plain:
    """Asks one question and pays for any answer."""

    def reset(self, seed):
        return "Go."

    def get_reward(self):
        return 1.0


@pytest.fixture(params=NAMES)
def kind(request):
    return Kind(request.param)


def prompts(*texts: str) -> Dataset:
    return Dataset.from_list([{"prompt": text} for text in texts])


# -- epochs


def test_a_finite_environment_is_visited_exactly_once_an_epoch(kind, tmp_path, monkeypatch):
    seen = []

    class Ten:
        @classmethod
        def num_tasks(cls, split):
            return 10

        def reset(self, task_index):
            seen.append(task_index)
            return f"Task {task_index}."

        def get_reward(self):
            return 1.0

    script(monkeypatch, ANSWER)
    options = {"max_steps": -1, "num_train_epochs": 2, "num_generations": 2, "per_device_train_batch_size": 6}
    trainer = kind.make(tmp_path, environment_factory=Ten, options=options)
    trainer.train()
    assert sorted(seen) == sorted([*range(10)] * 2 * 2), "two epochs of two siblings"
    assert trainer.state.epoch == 2.0 and trainer.state.global_step == 7


def test_without_a_dataset_the_epoch_is_the_part_of_the_run(kind, tmp_path, monkeypatch):
    script(monkeypatch, ANSWER)
    trainer = kind.make(tmp_path, environment_factory=Plain, options={"max_steps": 4, "num_train_epochs": 1})
    trainer.train()
    assert trainer.state.global_step == 4, "the epoch's stop never engages"
    assert logged(trainer, "epoch")[:4] == [0.25, 0.5, 0.75, 1.0]


# -- rewards


class Bias(nn.Module):
    """Scores a row by its sum of ids over a hundred, and keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.rows = []

    def forward(self, input_ids, attention_mask):
        self.rows += [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        return (input_ids * attention_mask).sum(-1).float() / 100 + self.anchor


@pytest.mark.parametrize("conversational", [True, False])
def test_a_module_scores_the_prompt_that_was_used(kind, tmp_path, monkeypatch, conversational):
    script(monkeypatch, ANSWER)
    model, prompt = Bias(), [{"role": "user", "content": "Say hello."}] if conversational else "Say"
    trainer = kind.make(
        tmp_path, reward_funcs=model, reward_processing_classes=tokenizer_of(),
        train_dataset=Dataset.from_list([{"prompt": prompt}]), options={"max_steps": 1},
    )  # fmt: skip
    trainer.train()
    text = tokenizer_of().decode(model.rows[-1])
    if conversational:
        assert text.startswith("<|im_start|>user\nSay hello.") and "<|im_start|>assistant\nhello" in text
    else:
        assert text == "Sayhello"
    assert logged(trainer, "rewards/Bias/mean") == [pytest.approx(sum(model.rows[-1]) / 100)]


def test_a_reset_that_makes_a_chat_of_a_plain_row_is_scored_as_a_chat(kind, tmp_path, monkeypatch):
    class Chats:
        def reset(self, prompt):
            return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]

    script(monkeypatch, ANSWER)
    model = Bias()
    trainer = kind.make(
        tmp_path, reward_funcs=[model], reward_processing_classes=[tokenizer_of()], environment_factory=Chats,
        train_dataset=prompts("Say"), options={"max_steps": 1},
    )  # fmt: skip
    trainer.train()
    assert tokenizer_of().decode(model.rows[-1]).startswith("<|im_start|>system\nBe brief.")


def test_turns_and_groups_pay_too(kind, tmp_path, monkeypatch):
    class Pays:
        def reset(self, seed):
            self.turns = 0
            return "Go."

        def step(self, message):
            self.turns += 1
            return StepResult(observation="on", reward=0.25, done=self.turns == 2)

        @classmethod
        def group_reward(cls, environments):
            return [float(index) for index, _ in enumerate(environments)]

    script(monkeypatch, [turn("a"), turn("b")])
    trainer = kind.make(tmp_path, environment_factory=Pays, options={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "rewards/turns/mean") == [0.5] and logged(trainer, "rewards/group/mean") == [1.5]
    assert logged(trainer, "reward") == [2.0]


def test_a_weight_that_names_nothing_is_told_once(kind, tmp_path, monkeypatch, caplog):
    class Parts(Plain):
        def get_reward(self):
            return {"sum": 1.0, "style": 1.0}

    script(monkeypatch, ANSWER)
    options = {"reward_weights": {"stlye": 10.0, "sum": 2.0}}
    trainer = kind.make(tmp_path, environment_factory=Parts, options=options)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    told = [record.getMessage() for record in caplog.records if "stlye" in record.getMessage()]
    assert len(told) == 1 and "did you mean 'style'?" in told[0]


def test_a_component_with_a_functions_name_is_an_error(kind, tmp_path, monkeypatch):
    class Parts(Plain):
        def get_reward(self):
            return {"judge": 1.0}

    def judge(completions):
        return [1.0] * len(completions)

    script(monkeypatch, ANSWER)
    trainer = kind.make(tmp_path, environment_factory=Parts, reward_funcs=judge)
    with pytest.raises(ConfigurationError, match=r"Parts names a component of its reward 'judge'"):
        trainer.train()


# -- evaluation


def test_an_environment_is_evaluated_on_tasks_that_training_never_draws(kind, tmp_path, monkeypatch):
    seeds = {"train": set(), "eval": set()}

    class Split(Plain):
        def reset(self, seed, split):
            seeds[split].add(seed)
            return "Go."

    script(monkeypatch, ANSWER)
    trainer = kind.make(tmp_path, environment_factory=Split, options={"eval_tasks": 3, "num_generations_eval": 2})
    trainer.train()
    metrics = trainer.evaluate()
    assert len(seeds["eval"]) == 3 and not seeds["eval"] & seeds["train"]
    assert metrics["eval_pass@1"] == metrics["eval_pass@2"] == metrics["eval_reward"] == 1.0


def test_what_evaluations_rows_lack_is_found_at_construction(kind, tmp_path):
    def right(completions, answer):
        return [1.0] * len(completions)

    rows = Dataset.from_list([{"prompt": "1+1", "answer": "2"}])
    with pytest.raises(ConfigurationError, match=r"'right' requires 'answer'.* in eval_dataset\['held'\]"):
        kind.make(tmp_path, reward_funcs=right, train_dataset=rows, eval_dataset={"held": prompts("2+2")})
    taken = Dataset.from_list([{"prompt": "2+2", "answer": "4", "prompts": "x"}])
    with pytest.raises(ConfigurationError, match="eval_dataset has a column 'prompts'"):
        kind.make(tmp_path, reward_funcs=right, train_dataset=rows, eval_dataset=taken)
    with pytest.raises(ConfigurationError, match=r"'right' requires 'answer'.* split='eval' of Plain"):
        kind.make(
            tmp_path, reward_funcs=right, train_dataset=rows.remove_columns("prompt"), environment_factory=Plain,
            options={"eval_strategy": "steps", "eval_steps": 1},
        )  # fmt: skip


# -- logs


def test_logs_have_the_names_that_trl_gives_them(kind, tmp_path, monkeypatch):
    def judge(completions, **kwargs):
        return [1.0, 0.0, 1.0, 0.0]

    script(monkeypatch, by_sibling(*[[turn("a" * n)] for n in (1, 2, 3, 4)]))
    options = {"max_steps": 2, "beta": 0.1} if kind.name != "SDPO" else {"max_steps": 2}
    trainer = kind.make(tmp_path, reward_funcs=judge, train_dataset=prompts("one"), options=options)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    wanted = TRL_KEYS | (CLIP_KEYS | {"kl"} if kind.name != "SDPO" else set())
    assert not wanted - set(first)
    assert first["reward_std"] == pytest.approx(3**-0.5), "over all episodes: sqrt(4 * 0.25 / 3)"
    per_round = first["tokens/prompt"] + first["tokens/sampled"]
    assert first["num_tokens"] == per_round and second["num_tokens"] == 2 * per_round
    assert first["step_time"] == first["time/step"] > 0


# -- rows


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        (3, ConfigurationError, ["row 0 of the dataset", "3"]),
        ([], KeyError, ["row 0 of the dataset", "prompt=[]"]),
        (None, KeyError, ["row 0 of the dataset", "prompt=None"]),
        ([{"role": "user", "content": [{"type": "image"}]}], ConfigurationError, ["row 0 of the dataset", "text only"]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_prompt_that_cannot_be_used_is_named_before_anything_is_sampled(
    kind, tmp_path, monkeypatch, prompt, error, words, streaming
):
    def judge(completions, **kwargs):
        return [1.0] * len(completions)

    samplers = script(monkeypatch, ANSWER)
    rows = IterableDataset.from_generator(lambda: iter([{"prompt": prompt}])) if streaming else [{"prompt": prompt}]
    with pytest.raises(error) as found:
        trainer = kind.make(tmp_path, reward_funcs=judge, train_dataset=rows)
        assert streaming, "rows that are there are checked at construction"
        trainer.train()
    assert all(word in str(found.value) for word in words), found.value
    assert not samplers or not samplers[0].requests


def test_where_nothing_scores_the_warning_names_no_environment(kind, tmp_path, monkeypatch, caplog):
    def nothing(completions, **kwargs):
        return [None] * len(completions)

    script(monkeypatch, ANSWER)
    options = {"max_consecutive_failed_groups": 1}
    trainer = kind.make(tmp_path, reward_funcs=nothing, train_dataset=prompts("one"), options=options)
    with pytest.raises(Exception, match="no reward function scored them"), caplog.at_level(logging.WARNING):
        trainer.train()
    assert "group train/0 dropped: 0 of 4 siblings scored; no reward function scored them" in caplog.text


# -- tools and rollouts


def test_tools_are_a_list(kind, tmp_path):
    def double(n: int) -> int:
        return 2 * n

    with pytest.raises(ConfigurationError, match=r"tools must be a list of functions.*tools=\[function\]"):
        kind.make(tmp_path, environment_factory=Plain, tools=double)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bonus": [1.0, 2.0]}, ["bonus", "2 values", "4 prompts"]),
        ({"logprobs": [[[-0.1]]] * 4}, ["logprobs[0]", "one number per token"]),
        ({"completion_ids": [[10**6]] * 4}, ["completion_ids[0]", "1000000"]),
        ({"prompt_ids": [[-1]] * 4}, ["prompt_ids[0]", "-1"]),
        ({"env_mask": [["x"]] * 4}, ["env_mask[0]", "one number per token"]),
    ],
)
def test_rollouts_of_the_wrong_shape_are_named(kind, tmp_path, changes, words):
    def judge(completions, **kwargs):
        return [1.0, 0.0, 1.0, 0.0]

    output = {"prompt_ids": [[1]] * 4, "completion_ids": [[2]] * 4, "logprobs": [[-0.1]] * 4} | changes
    trainer = kind.make(
        tmp_path, reward_funcs=judge, train_dataset=prompts("Say"), rollout_func=lambda prompts, trainer: output
    )
    with pytest.raises(ConfigurationError) as found:
        trainer.train()
    assert all(word in str(found.value) for word in words), found.value


# -- resuming


def test_a_run_resumed_on_a_dataset_ends_where_the_whole_run_ends(kind, tmp_path):
    rows = prompts(*(f"number {n}" for n in range(7)))
    seen = []

    def judge(prompts, completions, **kwargs):
        seen.append(prompts[0])
        return [len(text) / 7 for text in completions]

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_completion_length": 8,
               "deterministic": True}  # fmt: skip
    if kind.name == "SDPO":
        options["success_reward_threshold"] = 0.5

    def trainer():
        return kind.make(tmp_path, tiny_llama(), reward_funcs=judge, train_dataset=rows, options=options)

    whole = trainer()
    whole.train()
    drawn, weights = list(seen), flat(whole.model).clone()
    seen.clear()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen == drawn[2:] and torch.equal(weights, flat(resumed.model))
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["num_input_tokens_seen"] == resumed.state.num_input_tokens_seen > 0
    assert logged(resumed, "num_tokens") == logged(whole, "num_tokens")
