from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from envgrad import GRPOConfig, GRPOTrainer
from envgrad.rollout.runner import Round
from envgrad.training.completions import CompletionLog, completion_rows, split_episode
from envgrad.types import Episode, Group, StopReason, Task, TrainingSample, Turn

ANSWER = {
    "role": "assistant",
    "content": "four [bold]",
    "tool_calls": [{"function": {"name": "add", "arguments": {"n": 4}}}],
}
RESULT = {"role": "tool", "content": "4"}


def episode(position=0, sibling=0, *, messages=None, plain=None, reward=1.0, extras=None):
    turn = Turn(start=1, num_tokens=2, policy_version=0, message=ANSWER)
    before = [{"role": "user", "content": f"question {position}"}, dict(ANSWER), {"role": "user", "content": "again"}]
    return Episode(
        task=Task(position=position, split="train", environment="e", group_id=9, seed=9), sibling=sibling,
        token_ids=(1, 2, 3), mask=(0, 1, 1), logprobs=(0.0,) * 3, versions=(0,) * 3, prompt_length=1,
        messages=tuple(messages or [*before, ANSWER, RESULT]), turns=(turn,), stop_reason=StopReason.ANSWER,
        reward=reward, rewards={"exact": reward, "form": 0.25}, plain_prompt=plain, extras=extras or {},
    )  # fmt: skip


def sample(episode, advantages):
    return TrainingSample(
        token_ids=episode.token_ids, mask=episode.mask, logprobs=episode.logprobs, versions=episode.versions,
        advantages=advantages, prompt_length=1, group=episode.task.key, episode=episode,
    )  # fmt: skip


def two_groups():
    groups = [[episode(position, sibling) for sibling in range(2)] for position in range(2)]
    groups[1][1] = episode(1, 1, reward=None, extras={"source": "web"})
    played = Round(groups=tuple(Group(task=group[0].task, episodes=tuple(group)) for group in groups))
    return played, [sample(groups[0][0], (0.0, 1.0, 3.0)), sample(groups[0][1], (0.0, -2.0, -2.0)),
                    sample(groups[1][0], (0.0, 0.0, 0.0))]  # fmt: skip


def log(tmp_path, **options):
    console = Console(file=io.StringIO(), width=120)
    return CompletionLog(folder=tmp_path, console=console, **{"limit": None, "unique_prompts": False} | options)


def test_rows_have_the_mean_advantage_of_their_sampled_tokens():
    rows = completion_rows(*two_groups())
    assert [row.advantage for row in rows] == [2.0, -2.0, 0.0, None]
    assert rows[0].rewards == {"exact": 1.0, "form": 0.25} and rows[3].extras == {"source": "web"}


def test_an_earlier_turn_of_the_opening_is_not_taken_for_the_policys():
    prompt, completion = split_episode(episode())
    assert [message["role"] for message in prompt] == ["user", "assistant", "user"]
    assert completion == [ANSWER, RESULT]


def test_plain_text_stays_text():
    assert split_episode(episode(messages=[ANSWER], plain="2 + 2 =")) == ("2 + 2 =", "four [bold]")


def test_the_table_shows_texts_calls_rewards_and_advantages(tmp_path):
    shown = log(tmp_path)
    shown.record(*two_groups())
    shown.show(3)
    text = shown.console.file.getvalue()
    assert "Step 3" in text and "question 0" in text and "four [bold]add({'n': 4})" in text
    for words in ("exact 1.00", "form 0.25", "advantage 2.00", "exact -", "advantage -", "source: web"):
        assert words in text, words


def test_the_file_holds_all_rows_and_the_table_some(tmp_path):
    from datasets import load_dataset

    shown = log(tmp_path, limit=1, unique_prompts=True)
    shown.record(*two_groups())
    shown.show(7)
    text = shown.console.file.getvalue()
    assert ("question 0" in text) + ("question 1" in text) == 1
    rows = load_dataset("parquet", data_files=str(tmp_path / "completions_00007.parquet"), split="train",
                        cache_dir=str(tmp_path / "cache"))  # fmt: skip
    assert rows["advantage"][:] == [2.0, -2.0, 0.0, None] and rows["exact"][:] == [1.0, 1.0, 1.0, None]
    assert rows["step"][:] == [7] * 4 and "question 1" in rows["prompt"][2] and rows["source"][3] == "web"


def test_which_rows_are_drawn_depends_on_the_step_alone(tmp_path):
    found = []
    for _ in range(2):
        shown = log(tmp_path, limit=1)
        shown.record(*two_groups())
        shown.show(7)
        found.append(shown.console.file.getvalue())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_reporter_with_tables_gets_one_row_of_each_prompt(tmp_path, monkeypatch, name):
    logged = []
    fake = SimpleNamespace(Table=lambda dataframe: dataframe, log=logged.append)
    monkeypatch.setitem(sys.modules, name, fake)
    shown = log(tmp_path, unique_prompts=True, reporters=("tensorboard", name))
    shown.record(*two_groups())
    shown.show(1)
    (table,) = [entry["completions"] for entry in logged]
    assert table["advantage"].tolist()[0] == 2.0 and len(table) == 2


def test_a_reporter_that_fails_is_named_once_and_the_table_is_shown_all_the_same(tmp_path, monkeypatch, caplog):
    def refuse(entry):
        raise ConnectionError("no way there")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Table=lambda dataframe: dataframe, log=refuse))
    shown = log(tmp_path, reporters=("trackio",))
    shown.record(*two_groups())
    for step in (1, 2):
        shown.show(step)
    assert sum("no way there" in one.getMessage() for one in caplog.records) == 1
    assert "Step 2" in shown.console.file.getvalue()


def test_nothing_is_shown_before_a_round(tmp_path):
    shown = log(tmp_path / "none")
    shown.show(1)
    assert shown.console.file.getvalue() == "" and not (tmp_path / "none").exists()


class Letters:
    def reset(self, seed):
        return "Write."

    def step(self, message):
        return "", True

    def get_reward(self):
        return 1.0


def test_a_run_shows_its_completions_at_each_log(tmp_path, capsys):
    config = GRPOConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, num_generations=2, use_cpu=True,
        max_completion_length=4, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=2,
        log_completions=True, num_completions_to_print=1,
    )  # fmt: skip
    GRPOTrainer("starter", args=config, environment_factory=Letters).train()
    files = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert files == ["completions_00002.parquet", "completions_00004.parquet"]
    text = capsys.readouterr().out
    assert text.count("Write.") == 2 and "Step 4" in text
