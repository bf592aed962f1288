from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from envgrad import ConfigurationError, GRPOConfig, GRPOTrainer


class Letters:
    def reset(self, seed):
        self.length = 0
        return "Write."

    def step(self, message):
        self.length = len(message)
        return "", True

    def get_reward(self):
        return float(self.length % 3)


def make(tmp_path, callbacks=(), *, peft_config=None, environment=Letters, **changes):
    defaults = {
        "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4, "num_generations": 2,
        "max_completion_length": 4, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "beta": 0.1, "sync_ref_model": True,
        "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25,
    }  # fmt: skip
    config = GRPOConfig(**defaults | changes)
    return GRPOTrainer("starter", args=config, environment_factory=environment, callbacks=list(callbacks),
                       peft_config=peft_config)  # fmt: skip


def flat(parameters):
    return torch.cat([parameter.detach().flatten().clone() for parameter in parameters])


class Keep(TrainerCallback):
    """The policy's and the reference's weights after each step; the reference's as the next round sees it."""

    def __init__(self):
        self.policy, self.reference = {}, {}

    def look(self, trainer):
        step = trainer.state.global_step
        self.policy[step] = flat(trainer.model.parameters())
        self.reference[step] = flat(trainer.preparation.reference.weights().values())


def run(tmp_path, trainer, keep, **options):
    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            keep.look(trainer)

    keep.look(trainer)
    trainer.add_callback(Look())  # behind the one that mixes
    trainer.train(**options)


def test_the_reference_is_mixed_at_its_steps_only(tmp_path):
    trainer, keep = make(tmp_path), Keep()
    run(tmp_path, trainer, keep)
    first = keep.reference[0]
    assert torch.equal(first, keep.policy[0]) and not torch.equal(keep.policy[1], keep.policy[0])
    assert torch.equal(keep.reference[1], first)
    expected = 0.25 * keep.policy[2] + 0.75 * first
    assert torch.allclose(keep.reference[2], expected, atol=1e-7)
    assert torch.equal(keep.reference[3], keep.reference[2])
    assert torch.allclose(keep.reference[4], 0.25 * keep.policy[4] + 0.75 * expected, atol=1e-7)


def test_without_it_the_reference_stays(tmp_path):
    trainer, keep = make(tmp_path, sync_ref_model=False, ref_model_sync_steps=512, ref_model_mixup_alpha=0.6), Keep()
    run(tmp_path, trainer, keep)
    assert torch.equal(keep.reference[4], keep.reference[0])


def test_a_resumed_run_goes_on_with_the_mixed_reference(tmp_path):
    cut, rest = Keep(), Keep()
    run(tmp_path, make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2), cut)
    run(tmp_path, make(tmp_path), rest, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(rest.reference[0], cut.reference[0]), "a new trainer's, before it resumes"
    assert torch.equal(rest.reference[3], cut.reference[2]) and not torch.equal(cut.reference[2], cut.reference[0])


def test_a_checkpoint_without_a_mixed_reference_cannot_be_gone_on_with(tmp_path):
    plain = {"sync_ref_model": False, "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}
    make(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **plain).train()
    assert not (tmp_path / "checkpoint-1" / "reference.safetensors").exists()
    with pytest.raises(ConfigurationError, match="written without it"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_nothing_to_mix_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="set beta above 0"):
        make(tmp_path, beta=0.0)
    with pytest.raises(ConfigurationError, match="has adapters"):
        make(tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def test_evaluation_plays_as_many_episodes_at_once_as_asked(tmp_path):
    import asyncio

    class Counted(Letters):
        live = most = 0

        async def reset(self, seed):
            cls = type(self)
            cls.live += 1
            cls.most = max(cls.most, cls.live)
            await asyncio.sleep(0.01)
            return "Write."

        def get_reward(self):
            type(self).live -= 1
            return 1.0

    trainer = make(tmp_path, environment=Counted, sync_ref_model=False, ref_model_sync_steps=512,
                   ref_model_mixup_alpha=0.6, beta=0.0, per_device_eval_batch_size=5, num_generations_eval=2,
                   eval_tasks=8)  # fmt: skip
    trainer.evaluate()
    assert Counted.most == 4, "two whole groups of two fit into five"


def test_a_model_card_names_the_dataset(tmp_path):
    trainer = make(tmp_path)
    trainer.create_model_card(model_name="mine", dataset_name="my/data")
    assert "my/data" in (tmp_path / "README.md").read_text()


def test_checkpointed_activations_give_the_same_step(tmp_path):
    ends = []
    for on in (False, True):
        trainer = make(tmp_path, gradient_checkpointing=on, max_steps=2, optim="sgd")
        trainer.train()
        assert trainer.model.is_gradient_checkpointing is on
        ends.append(flat(trainer.model.parameters()))
    assert torch.allclose(*ends, atol=1e-6)
