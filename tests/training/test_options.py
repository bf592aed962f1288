"""Options and ways through a run: each acts as its name says, or is refused."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, TrainerCallback

from envgrad import ConfigurationError, GRPOTrainer, TooManyFailures
from envgrad.environments.contract import StepResult
from helpers.models import Constant, Letters, config, flat, tiny_llama, tokenizer_of


def make(tmp_path, model=None, environment=Letters, callbacks=None, peft_config=None, **changes):
    return GRPOTrainer(
        model if model is not None else tiny_llama(),
        args=config(tmp_path, **changes),
        environment_factory=environment,
        processing_class=tokenizer_of(),
        callbacks=callbacks,
        peft_config=peft_config,
    )


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Finite(Letters):
    def __init_subclass__(cls):
        cls.drawn = []

    @classmethod
    def num_tasks(cls, split):
        return 6

    def reset(self, task_index):
        self.drawn.append(task_index)
        return f"Write {task_index}."


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("environment", [Letters, Constant])
def test_half_precision_trains_on_a_cpu_with_a_ratio_of_one(tmp_path, precision, environment):
    trainer = make(tmp_path, environment=environment, beta=0.1 if environment is Letters else 0.0, **{precision: True})
    trainer.train()
    if environment is Constant:
        assert logged(trainer, "loss") == [0.0, 0.0]
        return
    assert logged(trainer, "ratio/max") == pytest.approx([1.0, 1.0], abs=1e-6)
    kl = logged(trainer, "kl")
    assert kl[0] == 0.0 and kl[1] > 0, "the reference runs in the policy's precision"


def test_weights_in_half_precision_get_their_old_log_probs_from_the_trainer(tmp_path):
    trainer = make(tmp_path, tiny_llama().to(torch.bfloat16), max_steps=1)
    trainer.train()
    assert logged(trainer, "ratio/max") == [1.0]


def test_bf16_is_not_chosen_for_a_cpu_beside_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    assert config(tmp_path, use_cpu=True).bf16 is False


def opt_model():
    torch.manual_seed(0)
    size = len(tokenizer_of())
    model = OPTForCausalLM(
        OPTConfig(vocab_size=size, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                  word_embed_proj_dim=16, max_position_embeddings=256, dropout=0.3, attention_dropout=0.0)
    )  # fmt: skip
    model.generation_config.eos_token_id = list(range(10, size, 5))
    return model


def test_dropout_rates_that_layers_keep_as_floats_are_found_and_switched_off(tmp_path):
    assert make(tmp_path, opt_model()).preparation.recompute_old
    trainer = make(tmp_path, opt_model(), disable_dropout=True, max_steps=1)
    trainer.train()
    assert logged(trainer, "ratio/max") == pytest.approx([1.0], abs=1e-5)


def test_disable_dropout_reaches_adapters(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.5)
    trainer = make(tmp_path, peft_config=lora, disable_dropout=True, max_steps=1)
    trainer.train()
    assert logged(trainer, "ratio/max") == pytest.approx([1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps_per_generation": -1}, "steps_per_generation=-1"),
        ({"generation_batch_size": 0}, "generation_batch_size=0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
        ({"max_concurrent_episodes": 3}, "max_concurrent_episodes=3 must be at least num_generations=4"),
        ({"max_concurrent_episodes": 4, "num_generations_eval": 5}, "num_generations_eval=5"),
        ({"torch_empty_cache_steps": 1}, "torch_empty_cache_steps=1 cannot act"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True cannot act"),
        ({"use_cache": True}, "use_cache=True cannot act"),
    ],
)
def test_options_that_cannot_act_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigurationError, match=words):
        config(tmp_path, **changes)


def test_an_attention_implementation_that_would_be_replaced_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigurationError, match="attn_implementation='eager'"):
        make(tmp_path, str(tmp_path / "model"), model_init_kwargs={"attn_implementation": "eager"})


@pytest.mark.parametrize("changes", [{"steps_per_generation": 2}, {"num_iterations": 2}])
def test_a_run_resumed_within_a_round_makes_the_steps_that_were_left(tmp_path, changes):
    class Spy(Letters):
        seeds: list[int] = []

        def reset(self, seed):
            self.seeds.append(seed)
            return super().reset(seed)

    def run(folder, steps, resume=False):
        Spy.seeds = []
        trainer = make(tmp_path / folder, environment=Spy, max_steps=steps, save_strategy="steps", save_steps=1,
                       deterministic=True, beta=0.1, **changes)  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return flat(trainer.model), list(dict.fromkeys(Spy.seeds))

    whole, seeds = run("whole", 4)
    _, before = run("cut", 1)
    resumed, after = run("cut", 4, resume=True)
    assert before + after == seeds and torch.equal(whole, resumed)
    kept = [{path.name for path in (tmp_path / "cut" / f"checkpoint-{step}").glob("rollout_*")} for step in (1, 4)]
    assert kept == [{"rollout_state.json", "rollout_steps.json", "rollout_steps.safetensors"}, {"rollout_state.json"}]


def test_training_again_starts_at_the_first_task(tmp_path):
    class Tasks(Finite):
        pass

    trainer = make(tmp_path, environment=Tasks, max_steps=-1, num_train_epochs=1, num_generations=2,
                   per_device_train_batch_size=4)  # fmt: skip
    trainer.train()
    assert (trainer.state.global_step, len(Tasks.drawn)) == (3, 12)
    trainer.train()
    assert (trainer.state.global_step, len(Tasks.drawn)) == (3, 24)


def test_a_task_that_replaces_a_dropped_one_is_not_drawn_beyond_the_epochs(tmp_path):
    class FirstBroken(Finite):
        def reset(self, task_index):
            super().reset(task_index)
            if task_index == 0:
                raise OSError("broken task")
            return "Write."

    trainer = make(tmp_path, environment=FirstBroken, max_steps=-1, num_train_epochs=1, num_generations=2,
                   per_device_train_batch_size=4, max_episode_retries=0)  # fmt: skip
    trainer.train()
    assert {index: FirstBroken.drawn.count(index) for index in range(6)} == dict.fromkeys(range(6), 2)
    assert trainer.state.epoch == 1.0


def test_an_epoch_evaluates_and_saves_once_the_last_one_too(tmp_path):
    class Tasks(Finite):
        pass

    trainer = make(tmp_path, environment=Tasks, max_steps=-1, num_train_epochs=2, num_generations=2,
                   per_device_train_batch_size=4, eval_strategy="epoch", save_strategy="epoch", eval_tasks=2,
                   )  # fmt: skip
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == [3, 6]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_the_best_model_is_saved_where_the_state_says_and_loaded_at_the_end(tmp_path):
    weights = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            weights[state.global_step] = flat(trainer.model)

    rewards = iter([0.1, 0.9, 0.2])
    trainer = make(tmp_path, max_steps=3, save_strategy="best", eval_strategy="steps", eval_steps=1, eval_tasks=1,
                   load_best_model_at_end=True, callbacks=[Keep()])  # fmt: skip
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: evaluate(*args, **kwargs) | {"eval_reward": next(rewards)}
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert torch.equal(flat(trainer.model), weights[2]) and not torch.equal(weights[2], weights[3])


def test_a_plateau_schedule_watches_the_evaluation_reward(tmp_path):
    trainer = make(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1,
                   eval_tasks=1)  # fmt: skip
    trainer.train()
    assert trainer.lr_scheduler.mode == "max" and trainer.lr_scheduler.last_epoch == 2


def test_evaluation_under_another_name_leaves_the_training_metrics_alone(tmp_path):
    class Evaluate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.evaluate(metric_key_prefix="test")

    trainer = make(tmp_path, logging_steps=2, callbacks=[Evaluate()], eval_tasks=1)
    trainer.train()
    assert all("reward" not in entry for entry in trainer.state.log_history if "test_reward" in entry)
    assert len(logged(trainer, "reward")) == 1


@pytest.mark.parametrize(("siblings", "tasks"), [(120, 1), (8, 40)])
def test_evaluation_with_more_siblings_than_training_does_not_wait_for_itself(tmp_path, siblings, tasks):
    class Slow(Letters):
        async def reset(self, seed):
            await asyncio.sleep(seed % 7 / 1000)
            return "Write."

    trainer = make(tmp_path, environment=Slow, num_generations=2, per_device_train_batch_size=2,
                   num_generations_eval=siblings, eval_tasks=tasks, max_completion_length=4)  # fmt: skip
    worker = threading.Thread(target=trainer.evaluate, daemon=True)
    worker.start()
    worker.join(120)
    assert not worker.is_alive()


def test_what_was_started_is_closed_if_the_rest_cannot_be(tmp_path):
    class First(Letters):
        live = 0

        def __init__(self):
            type(self).live += 1

        def close(self):
            type(self).live -= 1

    class Second(First):
        live = 0
        broken = False

        def __init__(self):
            if self.broken:
                raise OSError("gone")
            super().__init__()

    trainer = make(tmp_path, environment={"first": First, "second": Second}, max_steps=1)
    trainer.train()
    Second.broken = True
    with pytest.raises(ConfigurationError, match="gone"):
        trainer.evaluate()
    assert First.live == Second.live == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "envgrad-sampler"]


def test_a_run_that_is_stopped_by_failures_saves_a_checkpoint_that_plays_the_failed_round_anew(tmp_path):
    class Breaks(Letters):
        broken = False
        seeds: list[int] = []

        def reset(self, seed):
            self.seeds.append(seed)
            if self.broken:
                raise OSError("down")
            return super().reset(seed)

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            Breaks.broken = state.global_step == 1

    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 50, "max_consecutive_failed_groups": 2}
    with pytest.raises(TooManyFailures, match="down"):
        make(tmp_path, environment=Breaks, callbacks=[Break()], max_episode_retries=0, **options).train()
    failed, Breaks.broken, Breaks.seeds = list(dict.fromkeys(Breaks.seeds))[2:], False, []
    trainer = make(tmp_path, environment=Breaks, **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2 and list(dict.fromkeys(Breaks.seeds)) == failed


def test_text_with_lone_surrogates_is_played_and_logged(tmp_path):
    class Odd(Letters):
        def reset(self, seed):
            return "odd \ud800 text"

        def step(self, message):
            return StepResult("odd \ud800 too", reward=float(len(message) % 3), done=len(message) > 3)

    trainer = make(tmp_path, environment=Odd, max_steps=1, max_completion_length=40)
    assert trainer.train().global_step == 1
    record = next(trainer.episode_log.read())
    assert record["messages"][0]["content"] == "odd ? text"
