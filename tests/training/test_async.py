"""Training beside rollouts: the same weights where nothing overlaps, the bound where it does, and how it ends."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from envgrad import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    ConfigurationError,
    EnvironmentFailure,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SDPOConfig,
    SDPOTrainer,
    TooManyFailures,
)
from envgrad.sampling.engine import Engine
from envgrad.sampling.local import LocalSampler
from helpers.models import Letters, config, flat, tiny_llama, tokenizer_of
from helpers.trainers import Kind, logged, script
from helpers.world import call, turn

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINERS = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer), "sdpo": (SDPOConfig, SDPOTrainer)}
SMALL = {
    "num_generations": 4, "max_completion_length": 24, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 8, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
    "disable_tqdm": True, "use_cpu": True, "bf16": False, "log_episodes": False,
}  # fmt: skip


def starter(algorithm, folder, environment, **changes):
    config_class, trainer_class = TRAINERS[algorithm]
    if algorithm == "sdpo":
        changes = {"success_reward_threshold": 0.1} | changes
    args = config_class(output_dir=str(folder), **(SMALL | changes))
    if args.asynchronous:
        return AsyncGRPOTrainer("starter", spread, args, environment_factory=environment, algorithm=algorithm)
    return trainer_class("starter", spread, args=args, environment_factory=environment)


def make(folder, model=None, environment=Letters, **changes):
    args = config(folder, **({"asynchronous": True} | changes))
    return GRPOTrainer(
        tiny_llama() if model is None else model, args=args, environment_factory=environment,
        processing_class=tokenizer_of(),
    )  # fmt: skip


def leftover():
    return [thread.name for thread in threading.enumerate() if thread.name in ("envgrad-rollouts", "envgrad-sampler")]


# -- where nothing overlaps


def spread(completion_ids, **kwargs):
    """A reward that varies, beside the environment's own: the weights move from the first step on."""
    return [0.1 * (sum(ids) % 7) for ids in completion_ids]


@pytest.mark.parametrize(
    ("algorithm", "page", "steps"),
    [
        ("grpo", "guess_number", 20), ("grpo", "compass", 20), ("grpo", "two_envs", 20), ("rloo", "compass", 20),
        ("sdpo", "compass", 20), ("rloo", "guess_number", 5), ("sdpo", "guess_number", 5),
    ],
)  # fmt: skip
def test_without_staleness_weights_are_those_of_the_synchronous_trainer_bit_for_bit(
    tmp_path, monkeypatch, algorithm, page, steps
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(page)
    names = {"compass": "Compass", "guess_number": "GuessNumber"}
    factories = {name: getattr(module, kind) for name, kind in names.items() if hasattr(module, kind)}
    environment = factories if page == "two_envs" else factories[page]
    runs = []
    for changes in ({}, {"asynchronous": True, "max_staleness": 0}):
        trainer = starter(algorithm, tmp_path, environment, max_steps=steps, deterministic=True, **changes)
        before = flat(trainer.model)
        trainer.train()
        runs.append(flat(trainer.model))
    assert not torch.equal(before, runs[0]), "the weights must move, or nothing is shown"
    assert torch.equal(runs[0], runs[1])


def test_the_same_with_adapters(tmp_path):
    runs = []
    for changes in ({}, {"asynchronous": True, "max_staleness": 0}):
        args = config(tmp_path, deterministic=True, max_steps=4, **changes)
        torch.manual_seed(0)
        trainer = GRPOTrainer(
            tiny_llama(), args=args, environment_factory=Letters, processing_class=tokenizer_of(),
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        )  # fmt: skip
        before = flat(trainer.model)
        trainer.train()
        runs.append(flat(trainer.model))
    assert not torch.equal(before, runs[0]) and torch.equal(runs[0], runs[1])


# -- the bound


class Ages(TrainerCallback):
    """How many optimizer steps lie between a round's oldest token and its first pass, by round."""

    def __init__(self):
        self.trainer, self.seen, self.of_rounds = None, None, []

    def on_step_end(self, args, state, control, **kwargs):
        played = self.trainer.last_round
        if played is not self.seen:
            self.seen = played
            versions = [v for g in played.groups for e in g.episodes for v in e.versions if v >= 0]
            self.of_rounds.append(state.global_step - 1 - min(versions))


@pytest.mark.parametrize("inflight", [True, False])
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_sample_is_older_than_the_bound(tmp_path, staleness, inflight):
    ages = Ages()
    trainer = make(
        tmp_path, max_steps=12, max_staleness=staleness, inflight_weight_updates=inflight,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=16,
    )  # fmt: skip
    ages.trainer = trainer
    trainer.add_callback(ages)
    trainer.train()
    assert len(ages.of_rounds) == 12 and max(ages.of_rounds) <= staleness
    assert max(ages.of_rounds) > 0, "rollouts did run ahead"
    assert max(logged(trainer, "async/staleness_max")) == max(ages.of_rounds), "the metric says the same"
    assert set(logged(trainer, "async/dropped_share")) == {0.0}, "what is admitted in its turn is never thrown away"
    if not inflight:
        assert set(logged(trainer, "async/versions_per_episode")) == {1.0}
    assert not leftover()


def test_staleness_counts_publishes_where_a_round_has_several_steps(tmp_path):
    ages = Ages()
    trainer = make(
        tmp_path, max_steps=16, max_staleness=1, per_device_train_batch_size=4, num_generations=4,
        generation_batch_size=8, num_iterations=2, max_completion_length=8,
    )  # fmt: skip
    ages.trainer = trainer
    trainer.add_callback(ages)
    trainer.train()
    assert len(ages.of_rounds) == 4, "of two steps, made twice"
    assert max(ages.of_rounds) == 4 and max(logged(trainer, "async/staleness_max")) == 1.0


def test_log_probs_are_of_the_weights_of_each_tokens_version(tmp_path, monkeypatch):
    """An episode that spans updates says truly with which weights each token was sampled."""
    import envgrad.training.rollouts as rollouts
    from envgrad.sampling.engine import Engine

    step = Engine.step

    def slowly(self, **options):
        time.sleep(0.002)  # an episode takes longer than an update
        return step(self, **options)

    monkeypatch.setattr(Engine, "step", slowly)
    weights: dict[int, dict[str, torch.Tensor]] = {}
    publish = rollouts.Rollouts.publish

    def spying(self, version):
        weights[version] = {name: tensor.clone() for name, tensor in self.policy.base.state_dict().items()}
        publish(self, version)

    monkeypatch.setattr(rollouts.Rollouts, "publish", spying)
    rounds = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            rounds.append(trainer.last_round)
            control.should_training_stop = len(spanning()) > 2  # when an update falls into an episode, the clock says

    def spanning():
        episodes = [e for played in rounds for g in played.groups for e in g.episodes]
        return [e for e in episodes if len({v for v in e.versions if v >= 0}) > 1]

    trainer = make(
        tmp_path, max_steps=100, max_staleness=2, learning_rate=0.02, max_completion_length=200,
        per_device_train_batch_size=4, num_generations=2, beta=0.0,
    )  # fmt: skip
    trainer.add_callback(Keep())
    trainer.train()
    assert spanning(), "no update fell into an episode: nothing is shown"
    model = tiny_llama().eval()
    for episode in spanning()[:6]:
        for version in {v for v in episode.versions if v >= 0}:
            model.load_state_dict(weights[version])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([episode.token_ids])).logits[0].log_softmax(-1)
            for at, own in enumerate(episode.versions):
                if own == version:
                    assert logits[at - 1, episode.token_ids[at]].item() == pytest.approx(episode.logprobs[at], abs=1e-4)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_old_log_probs_can_be_those_before_the_first_update(tmp_path, mode):
    """Then the ratio is 1 at the first pass, whatever the age, and the age is in the importance weights."""
    trainer = make(
        tmp_path, max_steps=6, max_staleness=2, recompute_old_logprobs=True, sampler_ratio_mode=mode,
        sampler_ratio_cap=1.5, learning_rate=0.01, max_completion_length=16,
    )  # fmt: skip
    weights = []
    forward = trainer._forward_loss

    def spying(model, packed):
        weights.append(packed.importance)
        ratio = packed.old_logprobs - packed.sampler_logprobs
        if mode == "token_truncate":
            torch.testing.assert_close(packed.importance, ratio.exp().clamp(max=1.5))
        return forward(model, packed)

    trainer._forward_loss = spying
    trainer.train()
    assert max(float(one.max()) for one in weights) <= 1.5
    assert any(float((one - 1).abs().max()) > 1e-4 for one in weights), "stale samples have weights of their own"
    assert max(logged(trainer, "clip_ratio/region_mean")) == 0.0


# -- epochs: how runs end


class Ten:
    @classmethod
    def num_tasks(cls, split):
        return 10

    def reset(self, task_index):
        return f"Task {task_index}."

    def get_reward(self):
        return 1.0


def small(folder, monkeypatch, **given):
    script(monkeypatch, [turn("hello")])
    options = {"num_generations": 2, "per_device_train_batch_size": 4} | given.pop("options")
    return Kind("AsyncGRPO").make(folder, options=options, **given)


def test_epochs_end_the_run_after_as_many_distinct_groups(tmp_path, monkeypatch):
    trainer = small(tmp_path, monkeypatch, environment_factory=Ten, options={"max_steps": -1, "num_train_epochs": 1.25})
    trained = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trained.extend(group.task.position for group in trainer.last_round.groups)

    trainer.add_callback(Keep())
    trainer.train()
    assert sorted(trained) == list(range(13)), "ceil(1.25 * 10), each once"
    assert trainer.state.epoch == pytest.approx(1.3) and trainer.state.global_step == 7


def test_max_steps_switches_that_stop_off(tmp_path, monkeypatch):
    options = {"max_steps": 9, "num_train_epochs": 1}
    trainer = small(tmp_path, monkeypatch, environment_factory=Ten, options=options)
    trainer.train()
    assert trainer.state.global_step == 9 and trainer.state.epoch == pytest.approx(1.8)


def test_it_never_engages_where_the_environment_owns_endless_tasks(tmp_path, monkeypatch):
    options = {"max_steps": 6, "num_train_epochs": 0.1}
    trainer = small(tmp_path, monkeypatch, environment_factory=Letters, options=options)
    trainer.train()
    assert trainer.state.global_step == 6 and trainer.state.epoch == 1.0


def test_a_seed_of_dropped_groups_is_drawn_for_and_counted(tmp_path, monkeypatch):
    class Fails(Ten):
        def reset(self, task_index):
            if task_index == 3:
                raise EnvironmentFailure("the third is broken")
            return "Go."

    options = {"max_steps": -1, "num_train_epochs": 1, "max_episode_retries": 0}
    trainer = small(tmp_path, monkeypatch, environment_factory=Fails, options=options)
    trainer.train()
    assert sum(logged(trainer, "groups/dropped")) == 1.0 and trainer.state.epoch == 1.0


# -- evaluation and checkpoints


def test_evaluation_goes_on_beside_training_and_counts_no_publish(tmp_path):
    trainer = make(
        tmp_path, max_steps=6, max_staleness=1, eval_strategy="steps", eval_steps=1, eval_tasks=3,
        max_completion_length=12,
    )  # fmt: skip
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 6
    assert max(logged(trainer, "async/staleness_max")) <= 1 and set(logged(trainer, "async/dropped_share")) == {0.0}


def test_a_resumed_run_trains_each_task_once(tmp_path, monkeypatch):
    trained, played = [], []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trained.extend(group.task.position for group in trainer.last_round.groups)
            if state.global_step == 11 and not resuming:
                raise RuntimeError("the power went")

    script(monkeypatch, [turn("hello")], latency=0.002)
    rows = Dataset.from_list([{"prompt": f"p{number}"} for number in range(40)])
    options = {
        "max_steps": -1, "num_train_epochs": 1, "num_generations": 2, "per_device_train_batch_size": 4,
        "save_strategy": "steps", "save_steps": 3, "max_staleness": 3, "shuffle_dataset": False,
    }  # fmt: skip

    def judge(prompts, completions, **kwargs):
        played.append(int(prompts[0][1:]))
        return [0.0, 1.0]

    resuming = False
    trainer = Kind("AsyncGRPO").make(tmp_path, reward_funcs=judge, train_dataset=rows, options=options)
    trainer.add_callback(Keep())
    with pytest.raises(RuntimeError, match="the power went"):
        trainer.train()
    checkpoint, step = tmp_path / "checkpoint-9", 9
    state = json.loads((checkpoint / "rollout_state.json").read_text())
    in_play = [task["position"] for task in state["tasks"].get("again", [])]
    groups = json.loads((checkpoint / "rollout_groups.json").read_text())["records"]
    waiting = [int(key.removeprefix("train/")) for key, _ in groups["identities"]]
    assert waiting and not set(waiting) & set(in_play)
    lineage = trained[: 2 * step]
    assert sorted([*lineage, *waiting, *in_play]) == list(range(len(lineage) + len(waiting) + len(in_play)))
    trained.clear()
    played.clear()
    resuming = True
    trainer = Kind("AsyncGRPO").make(tmp_path, reward_funcs=judge, train_dataset=rows, options=options)
    trainer.add_callback(Keep())
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert sorted(lineage + trained) == list(range(40))
    assert not set(waiting) & set(played), "what was finished is not played again"
    assert set(waiting) <= set(trained)
    assert trainer.state.epoch == 1.0 and trainer.state.global_step == 20


def test_a_run_stopped_within_a_round_goes_on_within_it(tmp_path):
    changes = {
        "max_staleness": 2, "per_device_train_batch_size": 2, "generation_batch_size": 8, "num_generations": 2,
        "save_strategy": "steps", "save_steps": 1, "max_completion_length": 8,
    }  # fmt: skip
    make(tmp_path, max_steps=6, **changes).train()
    trainer = make(tmp_path, max_steps=8, **changes)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert trainer.state.global_step == 8 and trainer.last_round is None, "no new round was needed"


# -- life and death


def test_a_dead_sampler_ends_the_run_with_its_own_error(tmp_path, monkeypatch):
    step, count = Engine.step, 0

    def dying(self, **kwargs):
        nonlocal count
        count += 1
        if count > 40:
            raise RuntimeError("out of memory")
        return step(self, **kwargs)

    monkeypatch.setattr(Engine, "step", dying)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory"):
        make(tmp_path, max_steps=500, max_completion_length=8).train()
    assert time.monotonic() - began < 20 and not leftover()


def test_an_environment_that_always_fails_ends_the_run(tmp_path):
    class Broken(Letters):
        calls = 0

        def reset(self, *args, **kwargs):
            Broken.calls += 1
            if Broken.calls > 3:
                raise OSError("no space left")
            return super().reset(*args, **kwargs)

    began = time.monotonic()
    with pytest.raises(TooManyFailures) as found:
        make(tmp_path, environment=Broken, max_steps=100, max_consecutive_failed_groups=3).train()
    assert "no space left" in str(found.value) and time.monotonic() - began < 20 and not leftover()


def test_a_publish_that_fails_ends_the_run_and_keeps_the_old_version(tmp_path, monkeypatch):
    served = []
    update = Engine.update_weights

    def failing(self, version, named_tensors):
        served.append((version, self))
        if version == 2:
            named_tensors = {"model.norm.weight": torch.zeros(3)}
        update(self, version, named_tensors)

    monkeypatch.setattr(Engine, "update_weights", failing)
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight"):
        make(tmp_path, max_steps=9, max_completion_length=8).train()
    assert [version for version, _ in served] == [0, 1, 2] and served[-1][1].version == 1 and not leftover()


def test_weights_that_are_not_taken_over_in_time_end_the_run(tmp_path, monkeypatch):
    update, close, closed = Engine.update_weights, LocalSampler.close, threading.Event()

    def late(self, version, named_tensors):
        if version == 2:  # the sampler's thread is busy until it is stopped
            closed.wait(60)
        update(self, version, named_tensors)

    def closing(self):
        closed.set()
        close(self)

    monkeypatch.setattr(Engine, "update_weights", late)
    monkeypatch.setattr(LocalSampler, "close", closing)
    with pytest.raises(Exception, match="weight_sync_timeout"):
        make(tmp_path, max_steps=9, max_completion_length=64, weight_sync_timeout=0.5).train()


SCRIPT = """
import sys
sys.path.insert(0, {helpers!r})
from helpers.models import Letters, config, tiny_llama, tokenizer_of
from envgrad import GRPOTrainer


class Fatal(Letters):
    calls = 0

    def {where}(self{arguments}):
        Fatal.calls += 1
        if Fatal.calls >= 9:
            raise {error}
        return super().{where}({passed})


args = config({folder!r}, asynchronous=True, max_steps=200, max_consecutive_failed_groups=1, max_episode_retries=0,
              max_completion_length=8)
GRPOTrainer(tiny_llama(), args=args, environment_factory=Fatal, processing_class=tokenizer_of()).train()
print("the end")
"""


def test_a_failed_run_has_a_traceback_and_an_exit_code(tmp_path):
    text = SCRIPT.format(
        helpers=str(Path(__file__).parents[1]), where="reset", arguments=", seed", passed="seed", folder=str(tmp_path),
        error='MemoryError("fatal")',
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert (
        done.returncode != 0 and "fatal" in done.stderr and "Traceback" in done.stderr and "the end" not in done.stdout
    )


# -- known faults of other libraries


def by_first_token(completion_ids, **kwargs):
    return [float(ids[0] % 3) for ids in completion_ids]


def test_an_update_does_not_depend_on_how_it_is_cut_into_micro_steps(tmp_path, monkeypatch):
    """A token-normalised loss is divided by the step's tokens, whatever accumulation and steps_per_generation are."""
    updates = []
    for changes in (
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
    ):
        script(monkeypatch, lambda prompt, params, session: [5 + session.order[1], 6, 7, tokenizer_of().eos_token_id])
        model = tiny_llama()
        before = flat(model)
        trainer = Kind("AsyncGRPO").make(
            tmp_path, model, reward_funcs=by_first_token,
            train_dataset=Dataset.from_list([{"prompt": "one"}]),
            options={"num_generations": 4, "max_steps": 1, "learning_rate": 0.1, "optim": "sgd", **changes},
        )  # fmt: skip
        trainer.train()
        updates.append(flat(trainer.model) - before)
    assert updates[0].abs().max() > 0
    for other in updates[1:]:
        torch.testing.assert_close(other, updates[0], rtol=0, atol=1e-6)


class Long:
    """A tool that answers more than any limit."""

    def reset(self, seed):
        return "Ask."

    def ask(self) -> str:
        """Ask."""
        return "much " * 400

    def get_reward(self):
        return 0.5


def test_history_longer_than_the_budget_ends_the_episode_and_keeps_its_reward(tmp_path, monkeypatch):
    script(monkeypatch, [turn(call("ask")), turn("done")])
    options = {"max_steps": 2, "max_completion_length": 64}
    trainer = Kind("AsyncGRPO").make(tmp_path, environment_factory=Long, options=options)
    trainer.train()
    for group in trainer.last_round.groups:
        for episode in group.episodes:
            assert episode.truncated and episode.reward == 0.5 and episode.completion_length <= 64
    assert logged(trainer, "reward") == [0.5, 0.5]


def test_a_prompt_longer_than_the_context_ends_the_episode_at_once(tmp_path):
    class Endless(Letters):
        def reset(self, seed):
            return "x" * 20000

    trainer = make(tmp_path, environment=Endless)
    trainer.train()
    episodes = [episode for group in trainer.last_round.groups for episode in group.episodes]
    assert {str(episode.stop_reason) for episode in episodes} == {"context"}
    assert not any(episode.num_sampled_tokens for episode in episodes)


# -- names


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "sdpo"])
def test_the_trainer_by_trls_name_trains_every_algorithm(tmp_path, algorithm):
    options = {name: value for name, value in SMALL.items() if name != "max_completion_length"}
    args = AsyncGRPOConfig(output_dir=str(tmp_path), max_steps=2, max_staleness=2, max_completion_length=12, **options)
    trainer = AsyncGRPOTrainer("starter", None, args, environment_factory=Ten, algorithm=algorithm)
    trainer.train()
    assert type(trainer.user_args).__name__ == {"grpo": "AsyncGRPOConfig"}.get(algorithm, f"{algorithm.upper()}Config")
    assert trainer.user_args.max_completion_length == 12 and trainer.user_args.staleness == 2
    assert logged(trainer, "async/buffer_size")


def test_the_order_of_arguments_is_trls(tmp_path):
    args = AsyncGRPOConfig(output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    rows = Dataset.from_list([{"prompt": "one"}])
    trainer = AsyncGRPOTrainer(tiny_llama(), lambda completions, **kwargs: [0.0] * 8, args, rows, tokenizer_of())
    assert trainer.processing_class is not None and trainer.rollouts.inputs.train_dataset is rows
    trainer.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rollout_worker": object()}, "rollout_worker"),
        ({"weight_transfer": object()}, "weight_transfer"),
        ({"algorithm": "ppo"}, "choose one of grpo, rloo, sdpo"),
        ({"args": GRPOConfig(output_dir="x", max_steps=1, report_to="none")}, "asynchronous=False"),
        (
            {"args": RLOOConfig(output_dir="x", max_steps=1, report_to="none", asynchronous=True), "algorithm": "sdpo"},
            "algorithm='sdpo'",
        ),
    ],
)
def test_what_cannot_act_is_refused(given, words):
    with pytest.raises(ConfigurationError, match=words):
        AsyncGRPOTrainer("starter", environment_factory=Ten, **given)


def test_threads_are_shared_and_given_back(tmp_path):
    before, seen = torch.get_num_threads(), []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(torch.get_num_threads())

    torch.set_num_threads(4)
    try:
        trainer = make(tmp_path, max_steps=1, max_completion_length=4)
        trainer.add_callback(Keep())
        trainer.train()
        assert seen == [2] and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
