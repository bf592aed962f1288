"""Whole runs: several environments with options of their own, a curriculum, dynamic sampling, epochs, waves."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict

import datasets
import pytest
import torch

from envgrad import ConfigurationError, GRPOConfig, GRPOTrainer, RolloutTrainer
from envgrad.config.rloo import RLOOConfig
from envgrad.training.inputs import UserInputs
from helpers.models import Constant, Letters, config, flat, tiny_llama, tokenizer_of


def make(tmp_path, environment=Letters, callbacks=None, train_dataset=None, **changes):
    return GRPOTrainer(
        tiny_llama(),
        args=config(tmp_path, **changes),
        environment_factory=environment,
        train_dataset=train_dataset,
        processing_class=tokenizer_of(),
        callbacks=callbacks,
    )


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Steps:
    """Keeps the episodes of each optimizer step, and the rounds."""

    def __init__(self, trainer):
        self.batches, self.rounds, step = [], [], trainer.training_step

        def keep(model, item, *args):
            self.batches.append(item.batch)
            if item.played is not None:
                self.rounds.append(item.played)
            return step(model, item, *args)

        trainer.training_step = keep

    @property
    def episodes(self):
        return [[sample.episode for sample in batch.samples] for batch in self.batches]


class Half(Letters):
    """Ten tasks; those of an even index pay the same for anything."""

    @classmethod
    def num_tasks(cls, split):
        return 10

    def reset(self, task_index):
        self.index = task_index
        return f"Write {task_index}."

    def step(self, message):
        result = super().step(message)
        return result if self.index % 2 else ("ok", True)

    def get_reward(self):
        return 0.0 if self.index % 2 else 1.0


class TestEpochs:
    def test_steps_cross_an_epochs_end_and_only_the_last_is_smaller(self, tmp_path):
        trainer = make(tmp_path, Half, max_steps=-1, num_train_epochs=2, num_generations=2,
                       per_device_train_batch_size=6)  # fmt: skip
        steps = Steps(trainer)
        trainer.train()
        assert [len(episodes) for episodes in steps.episodes] == [6] * 6 + [4]
        tasks = [episode.task for episodes in steps.episodes for episode in episodes if episode.sibling == 0]
        assert [task.epoch for task in tasks] == [0] * 10 + [1] * 10
        assert Counter(task.task_index for task in tasks) == dict.fromkeys(range(10), 2)

    @pytest.mark.parametrize("where", ["rows", "mixture"])
    def test_rows_and_mixtures_count_epochs_too(self, tmp_path, where):
        rows = datasets.Dataset.from_list([{"environment": "ab"[number % 2], "task": number} for number in range(6)])
        environments = {"a": Letters, "b": Constant} if where == "rows" else {"a": Half, "b": Half}
        trainer = make(tmp_path, environments, train_dataset=rows if where == "rows" else None, max_steps=-1,
                       num_train_epochs=1, num_generations=2, per_device_train_batch_size=8)  # fmt: skip
        steps = Steps(trainer)
        trainer.train()
        drawn = Counter((one.task.environment, one.task.task_index) for step in steps.episodes for one in step)
        if where == "rows":
            assert drawn == {("ab"[number % 2], number): 2 for number in range(6)}
        else:
            assert drawn == {(name, index): 2 for name in "ab" for index in range(10)}
        assert trainer.state.epoch == 1.0

    def test_tasks_without_a_known_end_need_max_steps(self, tmp_path):
        stream = datasets.Dataset.from_list([{"text": "?"}]).to_iterable_dataset()
        with pytest.raises(ConfigurationError, match="streaming dataset"):
            make(tmp_path, train_dataset=stream, max_steps=-1)
        with pytest.raises(ConfigurationError, match="a curriculum, whose passes are not known"):
            make(tmp_path, {"a": Half, "b": Half}, max_steps=-1, curriculum="variance")
        trainer = make(tmp_path, train_dataset=stream, max_steps=1)
        trainer.train()
        assert trainer.state.epoch == 1.0


class TestDynamicSampling:
    def test_finite_tasks_are_drawn_once_and_rewards_are_of_all_that_were_played(self, tmp_path):
        trainer = make(tmp_path, Half, max_steps=-1, num_train_epochs=2, per_device_train_batch_size=8,
                       dynamic_sampling=True)  # fmt: skip
        steps = Steps(trainer)
        trainer.train()
        trained = [episode.task for episodes in steps.episodes for episode in episodes if episode.sibling == 0]
        played = [group.task for one in steps.rounds for group in one.scored]
        assert [task.position for task in played] == list(range(20))
        assert Counter(task.task_index for task in played) == dict.fromkeys(range(10), 2)
        fill = sum(one.unteaching for one in steps.rounds)
        assert sum(task.task_index % 2 == 0 for task in trained) == fill < 3
        assert len(steps.batches) < 10 and trainer.state.epoch == 2.0, "ten steps of two groups were the most"
        assert all(len(episodes) == 8 for episodes in steps.episodes[:-1])
        for number, one in enumerate(steps.rounds):
            rewards = [episode.reward for group in one.scored for episode in group.episodes]
            assert logged(trainer, "reward")[number] == pytest.approx(sum(rewards) / len(rewards))
            assert logged(trainer, "groups/filtered")[number] == len(one.filtered)
            assert logged(trainer, "groups/unteaching")[number] == one.unteaching
        records = list(trainer.episode_log.read())
        assert len(records) == 80
        filtered = {record["position"] for record in records if record["filtered"]}
        assert filtered == {group.task.position for one in steps.rounds for group in one.filtered}

    def test_where_nothing_teaches_the_run_ends_all_the_same(self, tmp_path):
        trainer = make(tmp_path, Constant, max_steps=2, dynamic_sampling=True, max_dynamic_rounds=2)
        before = flat(trainer.model)
        trainer.train()
        assert trainer.state.global_step == 2 and torch.equal(before, flat(trainer.model))
        assert logged(trainer, "groups/filtered") == [4.0, 4.0] and logged(trainer, "groups/unteaching") == [2.0, 2.0]
        assert logged(trainer, "frac_reward_zero_std") == [1.0, 1.0] and logged(trainer, "reward") == [1.0, 1.0]

    def test_it_is_off_by_default(self, tmp_path):
        trainer = make(tmp_path, Constant)
        trainer.train()
        assert not logged(trainer, "groups/filtered") and logged(trainer, "groups/dropped") == [0.0, 0.0]


class TestOptions:
    def test_each_environment_has_its_own_size_limits_and_temperature(self, tmp_path):
        own = {"hot": {"num_generations": 6, "temperature": 2.0, "max_completion_length": 5}, "mild": {}}
        trainer = make(tmp_path, {"hot": Letters, "mild": Letters}, max_steps=2, environment_options=own)
        steps = Steps(trainer)
        trainer.train()
        for episodes in steps.episodes:
            assert Counter(episode.task.environment for episode in episodes) == {"hot": 6, "mild": 4}
        lengths = defaultdict(int)
        for episode in (one for episodes in steps.episodes for one in episodes):
            lengths[episode.task.environment] = max(lengths[episode.task.environment], episode.completion_length)
        assert lengths["hot"] == 5 < lengths["mild"] <= 12
        temperatures = [{one.temperature for one in batch.micro_batches} for batch in steps.batches]
        assert temperatures == [{None, 2.0}] * 2
        # the loss's log-probs are at each environment's own temperature, as the sampler's are
        assert logged(trainer, "ratio/max")[0] == pytest.approx(1.0, abs=1e-4)

    @pytest.mark.parametrize("make_config", [RLOOConfig, GRPOConfig])
    def test_the_reference_is_read_at_each_environments_temperature(self, tmp_path, make_config):
        """Before the first update the policy is its reference: their log-probs differ by nothing."""
        fields = vars(config(tmp_path))
        own = {"hot": {"temperature": 2.0}, "cold": {"temperature": 0.5}}
        names = ("output_dir", "max_steps", "per_device_train_batch_size", "num_generations", "max_completion_length",
                 "learning_rate", "logging_steps", "report_to", "save_strategy", "disable_tqdm", "use_cpu")  # fmt: skip
        given = make_config(**{name: fields[name] for name in names}, beta=0.1, environment_options=own)
        trainer = RolloutTrainer(
            tiny_llama(), given, given.algorithm(),
            UserInputs(environment_factory={"hot": Letters, "mild": Letters, "cold": Letters}),
            processing_class=tokenizer_of(),
        )  # fmt: skip
        steps = Steps(trainer)
        trainer.train()
        kl = logged(trainer, "kl")
        assert abs(kl[0]) < 1e-5 < abs(kl[1])
        assert {one.temperature for batch in steps.batches for one in batch.micro_batches} == {2.0, None, 0.5}

    def test_evaluation_has_its_own_number_of_siblings(self, tmp_path):
        own = {"a": {"num_generations": 6}}
        trainer = make(tmp_path, {"a": Letters, "b": Letters}, environment_options=own, num_generations_eval=2,
                       eval_tasks=4)  # fmt: skip
        assert [len(group.episodes) for group in trainer.play_eval().groups] == [2] * 4

    def test_instances_suffice_for_the_largest_groups(self, tmp_path):
        own = {"a": {"num_generations": 8}}
        trainer = make(tmp_path, {"a": Letters, "b": Letters}, environment_options=own, max_concurrent_episodes=8,
                       per_device_train_batch_size=16, max_steps=1)  # fmt: skip
        steps = Steps(trainer)
        trainer.train()
        assert [len(episodes) for episodes in steps.episodes] == [2 * 8 + 2 * 4]

    def test_names_are_checked_at_construction(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"names 'Letter'.*did you mean 'Letters'"):
            make(tmp_path, {"Letters": Letters}, environment_options={"Letter": {"max_turns": 2}})
        with pytest.raises(ConfigurationError, match="is for named environments"):
            make(tmp_path, Letters, environment_options={"Letters": {"max_turns": 2}})


class TestCurriculum:
    CHANGES = {"curriculum": "variance", "curriculum_decay": 0.5, "curriculum_min_share": 0.1,
               "environment_weights": {"flat": 0.5, "good": 0.5}, "num_generations": 2}  # fmt: skip

    def test_weight_moves_to_the_environment_that_teaches(self, tmp_path):
        trainer = make(tmp_path, {"flat": Constant, "good": Letters}, max_steps=6, **self.CHANGES)
        steps = Steps(trainer)
        trainer.train()
        shares = logged(trainer, "curriculum/flat")
        assert shares[0] == 0.5 and shares[-1] == 0.1
        assert logged(trainer, "curriculum/good")[-1] == 0.9
        drawn = Counter(group.task.environment for one in steps.rounds[3:] for group in one.groups)
        assert 0 < drawn["flat"] <= 3 and drawn.total() == 12

    def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(self, tmp_path):
        def run(folder, steps, resume=False):
            trainer = make(tmp_path / folder, {"flat": Constant, "good": Letters}, max_steps=steps,
                           save_strategy="steps", save_steps=1, deterministic=True, **self.CHANGES)  # fmt: skip
            kept = Steps(trainer)
            trainer.train(resume_from_checkpoint=resume)
            tasks = [group.task for one in kept.rounds for group in one.groups]
            return flat(trainer.model), tasks, logged(trainer, "curriculum/flat")

        whole, tasks, shares = run("whole", 4)
        run("cut", 2)
        resumed, rest, more = run("cut", 4, resume=True)
        assert rest == tasks[8:] and torch.equal(whole, resumed)
        assert more[-2:] == shares[2:] and len(set(shares)) > 2

    def test_it_needs_several_environments(self, tmp_path):
        with pytest.raises(ConfigurationError, match="there is only Letters"):
            make(tmp_path, Letters, curriculum="variance")


class Slow(Letters):
    """Two turns, and a tool's time that nobody can foresee."""

    def reset(self, seed):
        self.turns = 0
        return super().reset(seed)

    def step(self, message):
        time.sleep(random.SystemRandom().random() * 0.01)
        self.turns += 1
        result = super().step(message)
        return result if self.turns > 1 else ("again", False)

    def get_reward(self):
        time.sleep(random.SystemRandom().random() * 0.02)
        return 0.0


def test_with_fewer_groups_in_flight_than_a_round_has_the_clock_decides_nothing(tmp_path):
    runs = []
    for number in range(2):
        trainer = make(tmp_path / str(number), Slow, deterministic=True, max_concurrent_episodes=4, num_generations=2,
                       per_device_train_batch_size=16, max_completion_length=40)  # fmt: skip
        steps = Steps(trainer)
        trainer.train()
        logprobs = [episode.logprobs for episodes in steps.episodes for episode in episodes]
        runs.append((flat(trainer.model), logprobs))
    assert runs[0][1] == runs[1][1] and torch.equal(runs[0][0], runs[1][0])
