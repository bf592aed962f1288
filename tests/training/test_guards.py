"""Numbers that are not finite, put in at each place, on every trainer: named; updates are made whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerCallback

from envgrad import ConfigurationError, StepResult
from envgrad.errors import NonFiniteError, TooManyFailures
from envgrad.training.guards import MOST_IN_A_ROW
from helpers.models import Constant, Letters, flat, tiny_llama
from helpers.trainers import NAMES, Kind, by_sibling, logged, script
from helpers.world import call, turn

pytestmark = pytest.mark.filterwarnings("ignore")

BAD = 2
"""the optimizer step in which something is not finite"""


class Varied(Letters):
    """Siblings earn 0, 0.25, 0.5 and 0.75."""

    count = itertools.count()

    def step(self, message):
        return StepResult("ok", done=True)

    def get_reward(self):  # of answers that are cut off too
        return next(self.count) % 4 / 4


@pytest.fixture(params=NAMES)
def kind(request):
    return Kind(request.param)


def make(kind, folder, environment=Varied, **options):
    base = {
        "max_steps": 3, "max_completion_length": 8, "weight_decay": 0.1, "max_grad_norm": 0.5,
        "max_tokens_per_microbatch": 40, "lr_scheduler_type": "linear",
    }  # fmt: skip
    if kind.name == "SDPO":  # somebody must count as solved
        base["success_reward_threshold"] = 0.5
    trainer = kind.make(folder, tiny_llama(), environment_factory=environment, options=base | options)
    trainer.add_callback(Watch(trainer))
    return trainer


class Watch(TrainerCallback):
    """Weights, optimizer state and learning rate behind each step."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.seen = []
        trainer.watch = self

    def look(self):
        state = self.trainer.optimizer.state_dict()["state"]
        moments = [value.clone() for one in state.values() for value in one.values() if torch.is_tensor(value)]
        self.seen.append((flat(self.trainer.model).clone(), moments, self.trainer.lr_scheduler.get_last_lr()))

    def on_train_begin(self, *args, **kwargs):
        self.look()

    def on_step_end(self, *args, **kwargs):
        self.look()

    def changed(self, step):
        """Whether (weights, optimizer state, learning rate) differ from those before the step."""
        (weights, moments, rate), (weights_then, moments_then, rate_then) = self.seen[step], self.seen[step - 1]
        same = len(moments) == len(moments_then) and all(
            torch.equal(one, other) for one, other in zip(moments, moments_then, strict=True)
        )
        return not torch.equal(weights, weights_then), not same, rate != rate_then


@contextlib.contextmanager
def said(caplog, *words):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        yield
    text = " ".join(record.getMessage() for record in caplog.records)
    assert all(word in text for word in words), text


# -- what is put in


def in_gradient(trainer, monkeypatch):
    """A NaN in one parameter's gradient, in the step's last micro-batch: the others have been added by then."""
    name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if n.endswith("down_proj.weight"))
    allows = trainer.guard.allows

    def poisoned(batch, step, algorithm):
        if step == BAD:
            parameter.grad[0, 0] = math.nan
        return allows(batch, step, algorithm)

    monkeypatch.setattr(trainer.guard, "allows", poisoned)
    return [f"the gradient of {name} is not finite", "groups train/"]


def in_loss(trainer, monkeypatch):
    """An infinite loss of one micro-batch, of finite log-probs."""
    loss = type(trainer.algorithm).loss

    def poisoned(self, inputs):
        found = loss(self, inputs)
        bad = trainer.state.global_step + 1 == BAD
        return replace(found, loss=found.loss * math.inf if bad else found.loss)

    monkeypatch.setattr(type(trainer.algorithm), "loss", poisoned)
    return [f"the loss of {type(trainer.algorithm).__name__} is", "episode train/", "of Varied"]


def in_policy(trainer, monkeypatch):
    """A NaN log-prob of one token of one micro-batch."""
    from envgrad.training import step_passes as module

    plain = module.policy_logprobs

    def poisoned(model, packed, **kwargs):
        outputs = plain(model, packed, **kwargs)
        if trainer.state.global_step + 1 == BAD and torch.is_grad_enabled():
            bad = torch.where(torch.arange(len(outputs.logprobs)) == 1, math.nan, 1.0)
            outputs = outputs._replace(logprobs=outputs.logprobs * bad)
        return outputs

    monkeypatch.setattr(module, "policy_logprobs", poisoned)
    return ["the policy's log-prob is nan at trained token 1 of episode train/", "of Varied"]


def in_batch(field, words):
    """One value of an input of the loss."""

    def put(trainer, monkeypatch):
        step = type(trainer).training_step

        def poisoned(self, model, inputs, *args):
            if self.state.global_step + 1 == BAD:
                first, *rest = inputs.batch.micro_batches
                tensor = getattr(first, field)
                tensor = torch.zeros_like(first.old_logprobs) if tensor is None else tensor.clone()
                tensor[0] = -math.inf
                batch = replace(inputs.batch, micro_batches=(replace(first, **{field: tensor}), *rest))
                inputs = replace(inputs, batch=batch)
            return step(self, model, inputs, *args)

        monkeypatch.setattr(type(trainer), "training_step", poisoned)
        return [words, "is -inf at trained token 0 of episode train/"]

    return put


PLACES = {
    "gradient": in_gradient,
    "loss": in_loss,
    "policy": in_policy,
    "old": in_batch("old_logprobs", "the old policy's"),
    "reference": in_batch("ref_logprobs", "the reference model's log-prob"),
    "advantage": in_batch("advantages", "the advantage (the algorithm's credit)"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_update_with_a_number_that_is_not_finite_is_skipped_whole(kind, place, tmp_path, monkeypatch, caplog):
    trainer = make(kind, tmp_path)
    words = PLACES[place](trainer, monkeypatch)
    with said(caplog, f"step {BAD}: ", "the update of this step is skipped, all of it", *words):
        trainer.train()
    assert trainer.watch.changed(BAD) == (False, False, False), "weights, optimizer state, schedule"
    assert trainer.watch.changed(1) == trainer.watch.changed(3) == (True, True, True)
    assert trainer.state.global_step == 3 and logged(trainer, "updates/skipped") == [0.0, 1.0, 0.0]
    assert trainer.guard.skipped == 1 and all(map(math.isfinite, logged(trainer, "loss")))
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("place", ["gradient", "policy"])
def test_it_ends_the_run_where_that_is_asked_for(kind, place, tmp_path, monkeypatch):
    trainer = make(kind, tmp_path, on_nonfinite="raise", save_strategy="steps", save_steps=100)
    words = PLACES[place](trainer, monkeypatch)
    with pytest.raises(NonFiniteError) as found:
        trainer.train()
    assert all(word in str(found.value) for word in (f"step {BAD}", "on_nonfinite='raise'", *words)), found.value
    assert torch.equal(flat(trainer.model), trainer.watch.seen[BAD - 1][0]), "no half of the update was made"
    assert (tmp_path / "checkpoint-1").is_dir(), "what was learned until then is kept"


def test_updates_that_are_skipped_for_ever_end_the_run(tmp_path, monkeypatch):
    trainer = make(Kind("GRPO"), tmp_path, max_steps=40)
    monkeypatch.setattr(trainer.guard, "_gradient_norm", lambda: torch.tensor(math.inf))
    with pytest.raises(NonFiniteError, match=f"norm is inf.*{MOST_IN_A_ROW} updates in a row"):
        trainer.train()
    assert trainer.state.global_step == MOST_IN_A_ROW - 1


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(tmp_path):
    class Breaks(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                with torch.no_grad():
                    model.model.norm.weight[0] = math.nan

    trainer = make(Kind("GRPO"), tmp_path, save_strategy="steps", save_steps=100)
    trainer.add_callback(Breaks())
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight is not finite itself"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_large_numbers_are_not_taken_for_infinite_ones(tmp_path, monkeypatch):
    trainer = make(Kind("GRPO"), tmp_path, max_steps=1)
    monkeypatch.setattr(trainer.guard, "_gradient_norm", lambda: torch.tensor(1.0))
    trainer.guard.begin()
    packed = torch.tensor([3e38, 3e38])
    micro = replace_micro(packed)
    trainer.guard.seen(micro, packed, torch.tensor(0.0))
    assert trainer.guard.allows(batch_of(micro), 1, trainer.algorithm)


def replace_micro(values):
    from envgrad.batch import padding_micro_batch

    zeros = torch.zeros_like(values)
    return replace(padding_micro_batch(), advantages=values, old_logprobs=zeros, ref_logprobs=None, importance=None,
                   sample_index=zeros.long(), samples=(0,))  # fmt: skip


def batch_of(*micro_batches):
    from envgrad.batch import Batch, StepTotals

    return Batch(
        micro_batches=micro_batches, samples=(), totals=StepTotals(num_samples=1, num_tokens=1), num_required_tokens=1
    )


# -- a gradient scaler


class Scaled(TrainerCallback):
    """Half precision's gradient scaler, on a CPU."""

    def __init__(self, trainer, monkeypatch, scale=1024.0):
        self.trainer = trainer
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        monkeypatch.setattr(trainer.accelerator, "unscale_gradients", self.unscale)

    def unscale(self, optimizer=None):
        for one in self.trainer.accelerator._optimizers:
            self.scaler.unscale_(one.optimizer)

    def on_train_begin(self, *args, **kwargs):
        trainer = self.trainer
        trainer.accelerator.scaler = self.scaler
        scaled = AcceleratedOptimizer(trainer.optimizer.optimizer, device_placement=False, scaler=self.scaler)
        trainer.accelerator._optimizers[:] = [scaled]
        trainer.optimizer = trainer.callback_handler.optimizer = scaled


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_with_a_gradient_scaler_an_overflow_lowers_the_scale_and_counts(tmp_path, monkeypatch, clip):
    trainer = make(Kind("GRPO"), tmp_path, max_grad_norm=clip)
    scaled = Scaled(trainer, monkeypatch)
    trainer.add_callback(scaled)
    in_gradient(trainer, monkeypatch)
    trainer.train()
    assert trainer.watch.changed(BAD) == (False, False, False) and trainer.watch.changed(3) == (True, True, True)
    assert logged(trainer, "updates/skipped") == [0.0, 1.0, 0.0] and scaled.scaler.get_scale() == 512.0


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_with_a_gradient_scaler_a_bad_log_prob_is_skipped_too(tmp_path, monkeypatch, clip):
    trainer = make(Kind("GRPO"), tmp_path, max_grad_norm=clip)
    scaled = Scaled(trainer, monkeypatch)
    trainer.add_callback(scaled)
    in_policy(trainer, monkeypatch)
    trainer.train()
    assert trainer.watch.changed(BAD) == (False, False, False) and trainer.watch.changed(3) == (True, True, True)
    assert logged(trainer, "updates/skipped") == [0.0, 1.0, 0.0] and scaled.scaler.get_scale() == 1024.0


def test_a_gradient_scaler_bears_a_step_that_teaches_nothing(tmp_path, monkeypatch):
    trainer = make(Kind("GRPO"), tmp_path, environment=Constant)
    trainer.add_callback(Scaled(trainer, monkeypatch))
    trainer.train()
    assert trainer.state.global_step == 3 and logged(trainer, "updates/skipped") == [0.0] * 3


# -- rewards and samplers


class Pays:
    """Its reward is what the agent said."""

    def reset(self, seed):
        self.paid = 0.0
        return "Pay."

    def pay(self, much: str) -> str:
        """
        Pay.

        Args:
            much: How much.
        """
        self.paid = float(much)
        return "paid"

    def get_reward(self):
        return self.paid


def answers(*sums):
    return by_sibling(*[[turn(call("pay", much=much)), turn("done")] for much in sums])


def test_an_infinite_reward_of_an_environment_drops_its_episode(kind, tmp_path, monkeypatch):
    script(monkeypatch, answers("1", "inf", "3", "-inf"))
    trainer = kind.make(tmp_path, environment_factory=Pays, options={"max_steps": 1, "max_episode_retries": 0})
    trainer.train()
    assert logged(trainer, "reward") == [2.0] and logged(trainer, "failures/environment") == [2.0]
    (group, *_) = trainer.last_round.groups
    assert [failure.sibling for failure in group.failures] == [1, 3]
    assert "Pays.get_reward returned inf" in str(group.failures[0].error)


def test_a_nan_of_an_environment_is_no_reward_and_no_failure(kind, tmp_path, monkeypatch):
    script(monkeypatch, answers("1", "nan", "3", "2"))
    trainer = kind.make(tmp_path, environment_factory=Pays, options={"max_steps": 1, "on_nonfinite": "raise"})
    trainer.train()
    assert logged(trainer, "reward") == [2.0] and logged(trainer, "episodes/unscored") == [1.0]
    assert logged(trainer, "failures/total") == [0.0]


@pytest.mark.parametrize(
    ("sums", "scores", "words"),
    [
        (("1", "inf", "3", "2"), None, ["Pays.get_reward returned inf"]),
        (("1", "2", "3", "4"), [1.0, math.inf, 0.0, 0.0], ["reward function 'judge' returned inf for completion 1"]),
        (
            ("1", "9e149", "3", "4"),
            [0.0, 9e149, 0.0, 0.0],
            ["episode train/", "/1 of Pays", "judge", "add up to 1.8e+150"],
        ),
    ],
)
def test_a_reward_that_is_not_finite_ends_the_run_where_that_is_asked_for(
    kind, tmp_path, monkeypatch, sums, scores, words
):
    def judge(completions, **kwargs):
        return scores

    script(monkeypatch, answers(*sums))
    given = {} if scores is None else {"reward_funcs": judge}
    trainer = kind.make(tmp_path, environment_factory=Pays, options={"max_steps": 1, "on_nonfinite": "raise"}, **given)
    with pytest.raises(NonFiniteError) as found:
        trainer.train()
    assert all(word in str(found.value) for word in [*words, "episode train/", "on_nonfinite='raise'"]), found.value


def test_a_reward_function_with_an_infinite_reward_drops_its_groups(kind, tmp_path, monkeypatch):
    def judge(completions, **kwargs):
        return [0.0, 9e149, 0.0, 0.0]

    script(monkeypatch, answers("1", "9e149", "3", "4"))
    options = {"max_steps": 1, "max_consecutive_failed_groups": 2}
    trainer = kind.make(tmp_path, environment_factory=Pays, reward_funcs=judge, options=options)
    with pytest.raises(TooManyFailures, match=r"add up to 1\.8e\+150"):
        trainer.train()


def test_turn_rewards_that_overflow_are_a_failure(tmp_path, monkeypatch):
    class Rich(Pays):
        def pay(self, much: str):
            """
            Pay.

            Args:
                much: How much.
            """
            from envgrad import ToolResult

            return ToolResult("paid", reward=float(much))

        def get_reward(self):
            return 1e149

    script(monkeypatch, answers("1", "1e150", "3", "2"))
    options = {"max_steps": 1, "max_episode_retries": 0}
    trainer = Kind("GRPO").make(tmp_path, environment_factory=Rich, options=options)
    trainer.train()
    (group, *_) = trainer.last_round.groups
    (failure,) = group.failures
    assert failure.kind == "environment" and "/1 of Rich: its rewards" in str(failure.error)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_prob_of_the_sampler_that_is_not_finite_drops_its_episode(kind, tmp_path, monkeypatch, value):
    class Poisoned:
        """Sibling 2's second answer has a bad log-prob."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        async def sample(self, prompt_ids, params, session):
            done = await self.inner.sample(prompt_ids, params, session)
            if session.order[1] == 2 and len(done.token_ids) > 1:
                done = replace(done, logprobs=(*done.logprobs[:-1], value))
            return done

    from envgrad.training import rollouts

    def play():
        script(monkeypatch, answers("1", "2", "3", "4"))
        plain = rollouts.make_local_sampler
        monkeypatch.setattr(rollouts, "make_local_sampler", lambda *args, **kwargs: Poisoned(plain(*args, **kwargs)))

    play()
    options = {"max_steps": 1, "max_episode_retries": 0}
    trainer = kind.make(tmp_path / "skip", environment_factory=Pays, options=options)
    trainer.train()
    (group, *_) = trainer.last_round.groups
    (failure,) = group.failures
    assert failure.kind == "sampler" and failure.sibling == 2 and logged(trainer, "failures/sampler") == [1.0]
    assert "/2 of Pays: the sampler gave token" in str(failure.error) and f"log-prob {value}" in str(failure.error)
    play()
    trainer = kind.make(tmp_path / "raise", environment_factory=Pays, options=options | {"on_nonfinite": "raise"})
    with pytest.raises(NonFiniteError, match="/2 of Pays: the sampler gave token"):
        trainer.train()


def test_the_option_is_checked(tmp_path):
    with pytest.raises(ConfigurationError, match="on_nonfinite='ignore'"):
        Kind("GRPO").config(tmp_path, on_nonfinite="ignore")
