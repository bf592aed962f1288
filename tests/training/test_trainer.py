from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from envgrad import ConfigurationError, GRPOTrainer, TooManyFailures
from envgrad.environments.contract import StepResult
from envgrad.logprobs import policy_logprobs
from helpers.models import Constant, Letters, config, flat, tiny_llama, tokenizer_of


def make(
    tmp_path, model=None, environment=Letters, callbacks=None, optimizers=(None, None), peft_config=None, **changes
):
    return GRPOTrainer(
        model if model is not None else tiny_llama(),
        args=config(tmp_path, **changes),
        environment_factory=environment,
        processing_class=tokenizer_of(),
        callbacks=callbacks,
        optimizers=optimizers,
        peft_config=peft_config,
    )


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_training_moves_the_weights_and_logs_what_happened(tmp_path):
    trainer = make(tmp_path)
    before = flat(trainer.model)
    trainer.train()
    assert not torch.equal(before, flat(trainer.model))
    assert logged(trainer, "epoch") == [0.5, 1.0, 1.0], "endless data: steps of max_steps"
    for name in ("reward", "reward_std", "completions/mean_length", "entropy", "clip_ratio/low_mean", "time/rollout"):
        assert len(logged(trainer, name)) == 2, name
    assert 0 < logged(trainer, "reward")[0] <= logged(trainer, "rewards/turns/mean")[0]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    runs = []
    for seed in (1, 1, 2):
        trainer = make(tmp_path, seed=seed, deterministic=True)
        trainer.train()
        runs.append(flat(trainer.model))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


class Ratios(TrainerCallback):
    """Compares the policy with what the sampler said, before the first update."""

    def __init__(self):
        self.trainer = None
        self.largest = 0.0
        self.tokens = 0

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step:
            return
        for packed in self.batch.micro_batches:
            with torch.no_grad():
                outputs = policy_logprobs(
                    self.trainer.model, packed, temperature=self.trainer.user_args.temperature, entropy="none"
                )
            ratio = (outputs.logprobs - packed.sampler_logprobs).exp()
            self.largest = max(self.largest, float((ratio - 1).abs().max()))
            self.tokens += len(ratio)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_importance_ratio_is_one_on_every_token_before_the_first_update(tmp_path, temperature):
    spy = Ratios()
    trainer = make(tmp_path, temperature=temperature, max_steps=1, callbacks=[spy], per_device_train_batch_size=32)
    spy.trainer = trainer
    step = trainer.training_step

    def keep(model, inputs, *args):
        spy.batch = inputs.batch
        return step(model, inputs, *args)

    trainer.training_step = keep
    trainer.train()
    assert spy.tokens > 40 and spy.largest < 1e-4


def test_an_update_does_not_depend_on_accumulation_or_packing(tmp_path):
    """Eight episodes of one group: in one piece, in four, as half of a round, in tiny micro-batches."""
    changes = [
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
        {"per_device_train_batch_size": 8, "max_tokens_per_microbatch": 24},
    ]
    for loss_type in ("dapo", "grpo", "dr_grpo", "bnpo"):
        updates = []
        for change in changes:
            model = tiny_llama()
            before = flat(model)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5)
            trainer = make(tmp_path, model, optimizers=(sgd, None), num_generations=8, max_steps=1, loss_type=loss_type,
                           max_grad_norm=0.0, **change)  # fmt: skip
            trainer.train()
            updates.append(flat(model) - before)
        assert updates[0].abs().max() > 1e-4
        for update in updates[1:]:
            assert (update - updates[0]).abs().max() < 1e-6, loss_type


def test_equal_rewards_teach_nothing_and_move_nothing(tmp_path):
    trainer = make(tmp_path, environment=Constant, weight_decay=0.1, max_steps=3)
    before = flat(trainer.model)
    trainer.train()
    assert torch.equal(before, flat(trainer.model)) and trainer.state.global_step == 3
    assert logged(trainer, "frac_reward_zero_std") == [1.0] * 3
    assert logged(trainer, "loss") == [0.0] * 3


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo"])
def test_all_episodes_truncated_and_masked_is_finite_and_moves_nothing(tmp_path, loss_type):
    class Endless(Letters):
        def step(self, message):
            return StepResult("go on", reward=float(len(message) % 3))

    trainer = make(tmp_path, environment=Endless, loss_type=loss_type, mask_truncated_completions=True, max_steps=1)
    before = flat(trainer.model)
    trainer.train()
    assert torch.isfinite(flat(trainer.model)).all() and torch.equal(before, flat(trainer.model))


def test_passes_over_a_round_and_a_reference_and_sequence_ratios_run(tmp_path):
    trainer = make(tmp_path, num_iterations=2, beta=0.1, max_steps=4, steps_per_generation=2, loss_type="grpo",
                   importance_sampling_level="sequence", per_device_train_batch_size=4)  # fmt: skip
    trainer.train()
    kl, ratio = logged(trainer, "kl"), logged(trainer, "ratio/max")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[-1] > 1e-6
    assert ratio[0] == pytest.approx(1.0, abs=1e-4) and abs(ratio[-1] - 1) > 1e-3
    assert len(logged(trainer, "reward")) == 1, "one round feeds all four steps"


def test_dropout_and_old_log_probs(tmp_path):
    """With active dropout the old log-probs are recomputed without it, and the rest is corrected by a weight of 1."""
    trainer = make(tmp_path, tiny_llama(attention_dropout=0.2), max_steps=1)
    assert trainer.preparation.recompute_old
    seen = {}
    step = trainer.training_step

    def keep(model, inputs, *args):
        seen["micro"] = inputs.batch.micro_batches[0]
        return step(model, inputs, *args)

    trainer.training_step = keep
    trainer.train()
    micro = seen["micro"]
    assert (micro.old_logprobs - micro.sampler_logprobs).abs().max() < 1e-4
    assert (micro.importance - 1).abs().max() < 1e-4
    assert logged(trainer, "ratio/max")[0] > 1.0001, "the training forward itself is random"
    quiet = make(tmp_path, tiny_llama(attention_dropout=0.2), disable_dropout=True, max_steps=1)
    assert not quiet.preparation.recompute_old


def test_lora_trains_adapters_only_and_its_reference_is_the_adapter_off(tmp_path):
    from peft import LoraConfig

    trainer = make(tmp_path, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
                   beta=0.05, max_steps=3, num_iterations=1)  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(before[name], p)}
    assert moved and all("lora_" in name for name in moved)
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[-1] > 0
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_a_saved_model_loads_in_plain_transformers_and_says_the_same(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'saved')!r}).eval()\n"
        "ids = torch.arange(5, 15)[None]\n"
        "torch.save((m(ids).logits.detach(), m.config.use_cache, 'envgrad' in sys.modules), "
        f"{str(tmp_path / 'out.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    logits, use_cache, loaded_us = torch.load(tmp_path / "out.pt")
    own = trainer.model.eval()(torch.arange(5, 15)[None]).logits.detach()
    assert torch.allclose(logits, own, atol=1e-5) and use_cache and not loaded_us
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == tokenizer_of().chat_template
    assert "envgrad" not in (tmp_path / "saved" / "config.json").read_text()


def test_resuming_draws_the_tasks_that_the_uninterrupted_run_draws(tmp_path):
    class Spy(Letters):
        seeds: list[int] = []

        def reset(self, seed):
            self.seeds.append(seed)
            return super().reset(seed)

    def run(folder, steps, resume=False):
        Spy.seeds = []
        trainer = make(tmp_path / folder, environment=Spy, max_steps=steps, save_strategy="steps", save_steps=2,
                       deterministic=True)  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return flat(trainer.model), list(dict.fromkeys(Spy.seeds)), trainer

    whole, seeds, _ = run("whole", 4)
    run("cut", 2)
    resumed, rest, trainer = run("cut", 4, resume=True)
    assert len(seeds) == 8 and rest == seeds[4:]
    assert torch.equal(whole, resumed) and trainer.state.epoch == 1.0


def test_checkpoints_are_whole_or_not_there(tmp_path, monkeypatch):
    from envgrad.training import checkpoint

    trainer = make(tmp_path, max_steps=4, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-3", "checkpoint-4"]
    assert not list(tmp_path.glob(".saving*"))
    assert json.loads((tmp_path / "checkpoint-4" / "rollout_state.json").read_text())["tasks"]
    args = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert args.gradient_accumulation_steps == 1

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_sync_tree", fail)
    broken = make(tmp_path / "b", max_steps=1, save_strategy="steps", save_steps=1)
    with pytest.raises(OSError, match="disk full"):
        broken.train()
    assert not list((tmp_path / "b").glob("checkpoint-*"))


def test_evaluation_plays_tasks_that_training_never_draws(tmp_path):
    class Spy(Letters):
        seen: dict[str, set[int]] = {"train": set(), "eval": set()}

        def reset(self, seed, split):
            self.seen[split].add(seed)
            return super().reset(seed)

    trainer = make(tmp_path, environment=Spy, eval_strategy="steps", eval_steps=1, eval_tasks=5)
    trainer.train()
    first = set(Spy.seen["eval"])
    metrics = trainer.evaluate()
    assert len(first) == 5 and Spy.seen["eval"] == first and not first & Spy.seen["train"]
    assert len(logged(trainer, "eval_reward")) == 3 and 0 <= metrics["eval_reward"] <= 1
    with pytest.raises(ConfigurationError, match="row 0"):
        trainer.evaluate(eval_dataset=[1])


def test_a_finite_environment_counts_real_epochs(tmp_path):
    class Finite(Letters):
        drawn: list[int] = []

        @classmethod
        def num_tasks(cls, split):
            return 10

        def reset(self, task_index):
            self.drawn.append(task_index)
            return f"Write {task_index}."

    trainer = make(tmp_path, environment=Finite, max_steps=-1, num_train_epochs=2, num_generations=2,
                   per_device_train_batch_size=6)  # fmt: skip
    trainer.train()
    counts = {index: Finite.drawn.count(index) for index in range(10)}
    assert counts == dict.fromkeys(range(10), 2 * 2), "each task twice, two siblings each"
    assert trainer.state.global_step == 7 and trainer.state.epoch == 2.0


def test_callbacks_and_optimizers_are_honoured(tmp_path):
    events = []

    class Spy(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            events.append((state.global_step, state.epoch))
            control.should_training_stop = state.global_step == 2

    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make(tmp_path, model, callbacks=[Spy()], optimizers=(optimizer, None), max_steps=5)
    trainer.train()
    assert events == [(1, 0.2), (2, 0.4)] and trainer.optimizer.optimizer is optimizer


def test_it_works_inside_a_running_event_loop_as_in_a_notebook(tmp_path):
    async def cell():
        return make(tmp_path, max_steps=1).train().global_step

    assert asyncio.run(cell()) == 1


def test_environments_and_threads_are_gone_after_training_and_after_an_error(tmp_path):
    class Counted(Letters):
        opened = closed = 0
        fail = False

        def __init__(self):
            type(self).opened += 1

        def reset(self, seed):
            if self.fail:
                raise OSError("broken")
            return super().reset(seed)

        def close(self):
            type(self).closed += 1

    trainer = make(tmp_path, environment=Counted)
    assert Counted.opened == 1 and Counted.closed == 0
    trainer.train()
    assert Counted.opened == Counted.closed
    trainer.evaluate()
    assert Counted.opened == Counted.closed
    Counted.fail = True
    with pytest.raises(TooManyFailures, match="broken"):
        trainer.train()
    assert Counted.opened == Counted.closed
    unused = make(tmp_path, environment=Counted)
    unused.close()
    unused.close()
    assert Counted.opened == Counted.closed
    names = {thread.name for thread in threading.enumerate() if thread.name in ("envgrad-rollouts", "envgrad-sampler")}
    assert not names


def test_episodes_are_logged_with_their_exact_tokens(tmp_path):
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    records = list(trainer.episode_log.read())
    assert len(records) == 16 and {record["step"] for record in records} == {0, 1}
    record = records[0]
    assert len(record["token_ids"]) == len(record["mask"]) == len(record["logprobs"]) == len(record["versions"])
    text = tokenizer_of().decode([t for t, m in zip(record["token_ids"], record["mask"], strict=True) if m])
    assert record["messages"][-2]["content"] in text
    assert not make(tmp_path / "off", log_episodes=False).episode_log


def test_the_starter_and_a_path_and_a_loaded_model_are_all_models(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer_of().save_pretrained(tmp_path / "model")
    for model in (str(tmp_path / "model"), tmp_path / "model", "starter"):
        trainer = GRPOTrainer(model, args=config(tmp_path, max_steps=1), environment_factory=Letters)
        assert trainer.train().global_step == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(loaded, args=config(tmp_path, max_steps=1), environment_factory=Letters)
    assert trainer.train().global_step == 1
