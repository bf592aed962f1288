from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from envgrad.config.evaluation import EvalConfig
from envgrad.environments.contract import StepResult
from envgrad.errors import ConfigurationError, TooManyFailures
from envgrad.evaluation.summary import summarize
from envgrad.rollout.runner import Round
from envgrad.sampling import endpoint_http
from envgrad.sampling.endpoint import Endpoint
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.training.evaluation import EndpointRollouts, eval_tasks, local_rollouts, play_evaluation
from envgrad.training.inputs import UserInputs
from envgrad.training.trainers import GRPOTrainer
from envgrad.types import StopReason
from helpers.chat_server import Answer, ChatServer, chat_server, message
from helpers.models import Letters, tiny_llama, tokenizer_of
from helpers.models import config as training_config
from helpers.trainers import script
from helpers.world import Counter


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_http, "FIRST_DELAY", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def config(tmp_path: Path, **changes: Any) -> EvalConfig:
    options = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "num_generations_eval": 2}
    return EvalConfig(**(options | changes))


def play(
    tmp_path: Path,
    answer: Callable[[dict[str, Any], int], Answer],
    environment: Any = Counter,
    *,
    tasks: int = 2,
    patience: float = 5.0,
    **changes: Any,
) -> tuple[Round, ChatServer]:
    """Tasks that a server of this test answers."""
    with chat_server(answer) as server:
        endpoint = Endpoint(url=server.url, model="m", patience=patience)
        inputs = UserInputs(environment_factory=environment)
        rollouts = EndpointRollouts(endpoint, config(tmp_path, **changes), inputs)
        played = play_evaluation(rollouts, eval_tasks(rollouts, "eval", tasks))
    return played, server


def turns(body: dict[str, Any]) -> int:
    return sum(said["role"] == "assistant" for said in body["messages"])


def count_twice(body: dict[str, Any], number: int) -> Answer:
    """Two calls, one after the other, and then an answer."""
    return message("", ("inc", '{"n": 2}')) if turns(body) < 2 else message("Done.")


def test_a_served_model_plays_whole_episodes(tmp_path: Path) -> None:
    Counter.opened = Counter.closed = 0
    played, server = play(tmp_path, count_twice)
    episodes = [episode for group in played.groups for episode in group.episodes]
    assert [episode.reward for episode in episodes] == [4.0] * 4
    assert {episode.stop_reason for episode in episodes} == {StopReason.ANSWER}
    assert [said["role"] for said in episodes[0].messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert episodes[0].messages[2]["content"] == "now 2"
    assert [turn.num_tokens for turn in episodes[0].turns] == [5, 5, 5]
    last = max(server.requests, key=turns)
    assert [said.get("content") for said in last["messages"] if said["role"] == "tool"] == ["now 2", "now 4"]
    assert last["messages"][2]["tool_call_id"] == last["messages"][1]["tool_calls"][0]["id"]
    assert last["tools"][0]["function"]["name"] == "inc"
    # Siblings have seeds of their own, so that a server that obeys them answers differently.
    assert len({request["seed"] for request in server.requests}) == len(server.requests) == 12
    assert Counter.opened == Counter.closed > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "envgrad-rollouts"]


def test_a_malformed_call_goes_back_to_the_model(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], number: int) -> Answer:
        broken = ("inc", '{"n": 1,,}'), ("nope", "{}"), ("inc", "[1]"), ("inc", '{"n": 3}')
        return message("", *broken) if turns(body) == 0 else message("Done.")

    played, server = play(tmp_path, answer, tasks=1, num_generations_eval=1)
    (episode,) = played.groups[0].episodes
    assert episode.reward == 3.0
    results = [said["content"] for said in server.requests[1]["messages"] if said["role"] == "tool"]
    assert results[0].startswith("malformed tool call") and "nope" in results[1] and "[1]" in results[2]
    assert results[3] == "now 3"
    assert [outcome.ok for outcome in episode.turns[0].outcomes] == [False, False, False, True]


def test_free_text_environments_get_the_text(tmp_path: Path) -> None:
    class Guess:
        def reset(self, seed: int) -> str:
            return "Which number?"

        def step(self, text: str) -> StepResult:
            return StepResult("higher", reward=0.25) if text == "1" else StepResult("yes", reward=0.5, done=True)

    played, server = play(tmp_path, lambda body, number: message(str(1 + turns(body))), Guess, tasks=1)
    assert [episode.reward for episode in played.groups[0].episodes] == [0.75, 0.75]
    last = max(server.requests, key=turns)
    assert "tools" not in last
    assert [said["content"] for said in last["messages"]] == ["Which number?", "1", "higher"]


def test_limits_of_tokens_and_turns_hold(tmp_path: Path) -> None:
    def endless(body: dict[str, Any], number: int) -> Answer:
        return message("", ("inc", '{"n": 1}'))

    played, _ = play(tmp_path, endless, tasks=1, max_turns=3)
    assert {episode.stop_reason for episode in played.groups[0].episodes} == {StopReason.MAX_TURNS}
    played, server = play(tmp_path, endless, tasks=1, max_completion_length=60)
    (first, _) = played.groups[0].episodes
    assert first.stop_reason is StopReason.MAX_COMPLETION_LENGTH
    assert first.completion_length <= 60
    asked = sorted({request["max_tokens"] for request in server.requests}, reverse=True)
    assert asked[0] == 60 and asked[1] < 55


def test_an_episode_that_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    began = time.monotonic()
    played, _ = play(tmp_path, lambda body, number: message("hi", delay=8.0), tasks=1, episode_timeout=0.5)
    assert time.monotonic() - began < 7.0
    assert {episode.stop_reason for episode in played.groups[0].episodes} == {StopReason.EPISODE_TIMEOUT}


def test_trouble_that_passes_costs_nothing(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], number: int) -> Answer:
        return {"status": 429 if number % 2 else 503, "text": "busy"} if number < 4 else count_twice(body, number)

    played, _ = play(tmp_path, answer)
    assert [episode.reward for group in played.groups for episode in group.episodes] == [4.0] * 4
    assert not played.failures


def test_failures_of_the_server_are_failures_and_no_zeros(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], number: int) -> Answer:
        if body["messages"][0]["content"] == "Break.":
            return {"status": 500, "text": "no"}
        return count_twice(body, number)

    class Sometimes(Counter):
        def reset(self, task_index: int) -> str:
            self.n = 0
            return "Break." if task_index == 1 else "Count."

        @classmethod
        def num_tasks(cls, split: str) -> int:
            return 3

    played, _ = play(tmp_path, answer, Sometimes, tasks=3, patience=0.1, max_episode_retries=0)
    summary = summarize(played, success_reward=4.0)
    assert (summary.tasks, summary.unscored_tasks) == (3, 1)
    assert summary.failures == {"sampler": 2}
    assert summary.reward is not None and summary.reward.mean == 4.0


def test_a_dead_server_ends_the_run_soon(tmp_path: Path) -> None:
    with chat_server(count_twice) as server:
        gone = server.url
    endpoint = Endpoint(url=gone, model="m", patience=0.3)
    rollouts = EndpointRollouts(endpoint, config(tmp_path), UserInputs(environment_factory=Counter))
    began = time.monotonic()
    with pytest.raises(TooManyFailures, match="ConnectError") as caught:
        play_evaluation(rollouts, eval_tasks(rollouts, "eval", 100))
    assert caught.value.__cause__ is not None
    assert time.monotonic() - began < 20.0


def test_a_refused_request_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="status 401: who are you") as caught:
        play(tmp_path, lambda body, number: {"status": 401, "text": "who are you"}, tasks=50)
    assert "--api-key-env" in str(caught.value)


def test_tasks_are_the_same_for_every_model_and_none_is_replaced(tmp_path: Path) -> None:
    class Odd(Counter):
        def get_reward(self) -> float | None:
            return None if self.task % 2 else 1.0

        def reset(self, task_index: int, seed: int) -> str:
            self.task, self.n = task_index, 0
            return "Count."

        @classmethod
        def num_tasks(cls, split: str) -> int:
            return 5 if split == "eval" else 50

    played, _ = play(tmp_path, lambda body, number: message("hi"), Odd, tasks=4)
    assert [group.task.task_index for group in played.groups] == [0, 2]
    assert [group.task.task_index for group in played.dropped] == [1, 3]
    everything, _ = play(tmp_path, lambda body, number: message("hi"), Odd, tasks=100)
    assert len(everything.groups) + len(everything.dropped) == 5


def test_splits_and_rows(tmp_path: Path) -> None:
    class Sums:
        def reset(self, question: str) -> str:
            self.question = question
            return question

        def answer(self, number: int) -> str:
            """
            Answer.

            Args:
                number: The sum.
            """
            return "thanks"

        def get_reward(self) -> float:
            return 1.0

    rows = [{"question": f"1+{number}?"} for number in range(7)]
    inputs = UserInputs(environment_factory=Sums, train_dataset=rows, eval_dataset=rows)
    rollouts = EndpointRollouts(Endpoint(url="http://host", model="m"), config(tmp_path, eval_tasks=3), inputs)
    with pytest.raises(ConfigurationError, match="split='test'"):
        eval_tasks(rollouts, "test")
    everything = eval_tasks(rollouts, "eval")
    assert everything.count == 7
    assert [task.row and task.row["question"] for task in everything.stream.take(7)] == [r["question"] for r in rows]
    train = eval_tasks(rollouts, "train", 2)
    assert train.count == 2
    assert [(task.split, task.task_index) for task in train.stream.take(2)] == [("train", 0), ("train", 1)]
    own = EndpointRollouts(Endpoint(url="http://host", model="m"), config(tmp_path, eval_tasks=3),
                           UserInputs(environment_factory=Counter))  # fmt: skip
    assert (eval_tasks(own, "eval").count, eval_tasks(own, "eval", 9).count) == (3, 9)
    for opened in (rollouts, own):
        opened.close()


def test_a_loaded_model_is_evaluated_greedily(tmp_path: Path) -> None:
    seen = []
    model = tiny_llama()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)

    class Say:
        def reset(self, seed: int) -> str:
            return "Say."

        def step(self, text: str) -> StepResult:
            return StepResult("", reward=1.0, done=True)

    rollouts = local_rollouts(
        folder, config(tmp_path, temperature=0, max_completion_length=8), UserInputs(environment_factory=Say)
    )
    played = play_evaluation(rollouts, eval_tasks(rollouts, "eval", 2), on_group=seen.append)
    assert sorted(group.task.position for group in seen) == [0, 1]
    answers = [episode.token_ids for group in played.groups for episode in group.episodes]
    assert len(answers) == 4 and len(set(answers)) == 1  # one prompt, and no draw


def test_a_policy_that_is_elsewhere_has_no_weights_here(tmp_path: Path) -> None:
    rollouts = EndpointRollouts(
        Endpoint(url="http://host", model="m"), config(tmp_path), UserInputs(environment_factory=Counter)
    )
    assert rollouts.answers is None
    with pytest.raises(AssertionError, match="no policy"):
        _ = rollouts.policy
    rollouts.close()


def test_temperature_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="temperature=-1"):
        config(tmp_path, temperature=-1)
    assert config(tmp_path, num_generations_eval=3, max_concurrent_episodes=4).num_generations == 3
    with pytest.raises(ConfigurationError, match="num_generations_eval"):
        config(tmp_path, num_generations_eval=8, max_concurrent_episodes=4)
    with pytest.raises(ConfigurationError, match="eval_success_reward"):
        config(tmp_path, eval_success_reward=float("nan"))


def test_a_trainer_s_evaluation_has_pass_at_k_and_intervals(tmp_path: Path) -> None:
    class Task(Letters):
        """Any text is a success in half of the tasks, and never in the others."""

        def reset(self, task_index: int) -> str:
            self.task = task_index
            return "Write."

        def step(self, text: str) -> StepResult:
            return StepResult("ok", done=True)

        def get_reward(self) -> float:
            return 0.7 * (self.task % 2)

        @classmethod
        def num_tasks(cls, split: str) -> int:
            return 4

    options = {"num_generations_eval": 2, "eval_tasks": 4, "eval_success_reward": 0.7, "max_completion_length": 4}
    trainer = GRPOTrainer(tiny_llama(), args=training_config(tmp_path, **options), environment_factory=Task,
                          processing_class=tokenizer_of())  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(0.35)
    assert (metrics["eval_pass@1"], metrics["eval_pass@2"]) == (0.5, 0.5)
    # Task means 0, 1, 0, 1: standard deviation 0.57735, over the square root of 4; t of 3 degrees of freedom is 3.1824.
    assert metrics["eval_pass@1_ci95"] == pytest.approx(3.182446 * 0.5773503 / 2)
    assert metrics["eval_reward_ci95"] == pytest.approx(0.7 * 3.182446 * 0.5773503 / 2)
    assert trainer.state.log_history[-1]["eval_pass@2"] == 0.5


def test_a_trainer_s_evaluation_plays_each_finite_task_once_and_replaces_none(tmp_path: Path) -> None:
    class Task(Letters):
        played: ClassVar[list[int]] = []

        def reset(self, task_index: int) -> str:
            self.task = task_index
            Task.played.append(task_index)
            return "Write."

        def get_reward(self) -> float | None:
            return None if self.task == 1 else 1.0  # one that cannot be scored is no reason to play another one

        @classmethod
        def num_tasks(cls, split: str) -> int:
            return 3 if split == "eval" else 10

    trainer = GRPOTrainer(tiny_llama(), args=training_config(tmp_path, num_generations_eval=2, max_completion_length=4),
                          environment_factory=Task, processing_class=tokenizer_of())  # fmt: skip
    assert trainer.user_args.eval_tasks > 3
    metrics = trainer.evaluate()
    assert sorted(Task.played) == [0, 0, 1, 1, 2, 2]
    assert (metrics["eval_tasks"], metrics["eval_tasks/unscored"]) == (3, 1)
    assert [len(group.episodes) for group in trainer.play_eval().groups] == [2, 2]
    assert len(Task.played) == 12


def test_the_long_work_of_now_is_told_to_displays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []
    update = ScriptedSampler.update_weights

    def watched(sampler: ScriptedSampler, version: int, tensors: Any) -> None:
        told.append(trainer.doing)
        update(sampler, version, tensors)

    class Watching(Letters):
        def reset(self, seed: int) -> str:
            told.append(trainer.doing)
            return super().reset(seed)

    monkeypatch.setattr(ScriptedSampler, "update_weights", watched)
    script(monkeypatch, lambda *_: [5, 2])
    trainer = GRPOTrainer(tiny_llama(), args=training_config(tmp_path, eval_tasks=3, max_concurrent_episodes=4),
                          environment_factory=Watching, processing_class=tokenizer_of())  # fmt: skip
    trainer.evaluate()
    assert told[0] == "installing weights of step 0" and trainer.doing is None
    assert {"evaluating, 0 of 3 tasks"} <= set(told[1:]) <= {f"evaluating, {n} of 3 tasks" for n in range(3)}
