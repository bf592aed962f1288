from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from envgrad.config import SDPOConfig
from envgrad.divergence import TeacherSignal
from envgrad.environments.contract import StepResult
from envgrad.errors import ConfigurationError
from envgrad.logprobs import PolicyForward, policy_logprobs
from envgrad.training.teacher import TEACHER_NAME, Diagnostics, MovingAverage, Teacher
from envgrad.training.trainers import SDPOTrainer
from envgrad.types import Episode, Group
from helpers.models import Constant, Letters, flat, tiny_llama, tokenizer_of

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}


def config(tmp_path: Path, **changes: Any) -> SDPOConfig:
    options: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 12, "learning_rate": 0.05, "lr_scheduler_type": "constant", "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "success_reward_threshold": 0.4,
    }  # fmt: skip
    return SDPOConfig(**(options | changes))


def make(
    tmp_path: Path, model: Any = None, environment: Any = Letters, peft_config: Any = None, callbacks: Any = None,
    **changes: Any,
) -> SDPOTrainer:  # fmt: skip
    return SDPOTrainer(
        model if model is not None else tiny_llama(),
        args=config(tmp_path, **changes),
        environment_factory=environment,
        processing_class=tokenizer_of(),
        peft_config=peft_config,
        callbacks=callbacks,
    )


def logged(trainer: SDPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def teacher_of(trainer: SDPOTrainer) -> Teacher:
    assert trainer.teacher is not None
    return trainer.teacher


HOW: list[dict[str, Any]] = [
    {},
    {"distillation_mode": "full_logits", "distillation_alpha": 0.5, "teacher_model_kind": "live"},
    {"distillation_mode": "topk_logits", "distillation_topk": 5, "distillation_add_tail": True},
    {"distillation_weight": 0.5, "teacher_model_kind": "base", "beta": 0.1},
]


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.get("distillation_mode", "-".join(how) or "default"))
def test_training_moves_the_weights_and_logs_what_happened(tmp_path: Path, how: dict[str, Any]) -> None:
    trainer = make(tmp_path, num_iterations=2, **how)
    before = flat(trainer.model)
    trainer.train()
    assert not torch.equal(before, flat(trainer.model)) and torch.isfinite(flat(trainer.model)).all()
    assert len(logged(trainer, "self_distillation/distillation_loss")) == 2
    assert 0 < logged(trainer, "self_distillation/reprompt_sample_fraction")[0] <= 1
    assert logged(trainer, "tokens/teacher")[0] > 0
    assert ("self_distillation/policy_loss" in trainer.state.log_history[0]) == ("distillation_weight" in how)


def test_a_round_without_a_solved_sibling_moves_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, success_reward_threshold=2.0, max_steps=3, diagnostics_warning_interval=2)
    before = flat(trainer.model)
    with caplog.at_level(logging.WARNING, "envgrad.training.teacher"):
        trainer.train()
    assert torch.equal(before, flat(trainer.model)) and trainer.state.global_step == 3
    assert logged(trainer, "loss") == [0.0] * 3
    told = [record.getMessage() for record in caplog.records if "no sample has a teacher" in record.getMessage()]
    assert [message[-3:-1] for message in told] == [" 1", " 2"], "at the first, and at every second in a row"


def test_equal_rewards_still_teach_if_solved(tmp_path: Path) -> None:
    trainer = make(tmp_path, environment=Constant, max_steps=1)
    before = flat(trainer.model)
    trainer.train()
    assert not torch.equal(before, flat(trainer.model)) and logged(trainer, "frac_reward_zero_std") == [1.0]


class Feedback(Letters):
    """Says what to do better, and never pays."""

    def step(self, message: str) -> StepResult:
        return StepResult("ok", reward=0.0, done=True)

    def get_feedback(self) -> str:
        return "write more letters"


@pytest.mark.parametrize("asked", [True, False])
def test_feedback_from_the_environment_reaches_the_teacher(tmp_path: Path, asked: bool) -> None:
    options: dict[str, Any] = {"use_successful_as_teacher": False} if asked else {}
    trainer = make(tmp_path, environment=Feedback, max_steps=1, include_environment_feedback=asked, **options)
    seen: list[str | None] = []
    stream = trainer.get_train_dataloader

    def watched() -> Any:
        made = stream()
        again = made.reprompt
        assert again is not None

        def reprompt(groups: Any, samples: Any) -> Any:
            done = again(groups, samples)
            prompts = [sample.teacher_prompt for sample in done.samples]
            seen.extend(None if ids is None else trainer.processing_class.decode(ids) for ids in prompts)
            return done

        made.reprompt = reprompt
        return made

    trainer.get_train_dataloader = watched  # type: ignore[method-assign]
    trainer.train()
    assert len(seen) == 8
    assert all(text is not None and "write more letters" in text for text in seen) if asked else set(seen) == {None}


# The moving average


def test_the_moving_average_follows_by_the_rule(tmp_path: Path) -> None:
    history: list[torch.Tensor] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            history.append(flat(kwargs["model"]))

    trainer = make(tmp_path, max_steps=4, teacher_update_rate=0.25, teacher_sync_steps=2, callbacks=[Watch()])
    first = flat(trainer.model)
    trainer.train()
    expected = first
    for student in (history[1], history[3]):
        expected = 0.75 * expected + 0.25 * student
    average = teacher_of(trainer).average
    assert average is not None
    assert torch.allclose(torch.cat([weight.flatten() for weight in average.weights.values()]), expected, atol=1e-6)
    assert torch.equal(flat(trainer.model), history[3]), "the student is itself again"


def test_the_teachers_weights_are_the_ones_that_speak(tmp_path: Path) -> None:
    """After the student moved: live speaks with its weights, base with the first ones, ema with what it holds."""
    for kind in ("live", "base", "ema"):
        model = tiny_llama()
        trainer = make(tmp_path, model, teacher_model_kind=kind)
        first = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        ids = torch.tensor([[1, 2, 3]])
        with teacher_of(trainer)._weights.active() as teacher, torch.no_grad():
            assert not teacher.training
            found = teacher(input_ids=ids).logits
        expected = (trainer.model if kind == "live" else first)(input_ids=ids).logits
        assert torch.allclose(found, expected, atol=1e-6), kind
        trainer.close()


@pytest.mark.parametrize("kind", ["base", "ema"])
@pytest.mark.parametrize("mode", ["sampled_token", "full_logits"])
def test_with_adapters_the_base_is_adapters_off_and_the_average_is_of_adapters_only(
    tmp_path: Path, kind: str, mode: str
) -> None:
    lora = LoraConfig(**(LORA | {"target_modules": ["q_proj", "lm_head"]}))
    trainer = make(tmp_path, peft_config=lora, teacher_model_kind=kind, distillation_mode=mode, learning_rate=0.5)
    teacher = teacher_of(trainer)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, weight in trainer.model.named_parameters() if not torch.equal(before[name], weight)]
    assert moved and all("lora_" in name for name in moved)
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in trainer.model.named_parameters())
    if kind == "ema":
        assert teacher.average is not None and set(moved) <= set(teacher.average.weights)
        assert all("lora_" in name for name in teacher.average.weights)
        return
    ids = torch.tensor([[1, 2, 3]])
    with teacher._weights.active() as model, torch.no_grad():
        found = model(input_ids=ids).logits
    with trainer.model.disable_adapter(), torch.no_grad():
        assert torch.equal(found, trainer.model(input_ids=ids).logits)


def test_an_adapted_heads_logits_come_from_the_teachers_weights(tmp_path: Path) -> None:
    """The head is called within the student's forward, when the student's weights are in place."""
    lora = LoraConfig(**(LORA | {"target_modules": ["q_proj", "lm_head"]}))
    trainer = make(tmp_path, peft_config=lora, distillation_mode="full_logits", max_steps=1,
                   teacher_update_rate=1e-9)  # fmt: skip
    teacher, signals = teacher_of(trainer), []
    give = teacher.signal

    def keep(packed: Any) -> TeacherSignal | None:
        with torch.no_grad():
            for name, weight in trainer.model.named_parameters():
                if "lora_" in name:
                    weight += 0.5 * torch.randn_like(weight)
        signals.append((packed, give(packed)))
        return signals[-1][1]

    teacher.signal = keep  # type: ignore[method-assign]
    trainer.train()
    for packed, signal in signals:
        logs = signal.logits(0, len(signal.index)).log_softmax(-1)
        rows = packed.teacher.rows
        with teacher._weights.active() as model, torch.no_grad():
            expected = policy_logprobs(model, rows).logprobs
        found = logs.gather(1, rows.target_ids[:, None])[:, 0]
        assert not torch.allclose(found, policy_logprobs(trainer.model, rows).logprobs, atol=1e-3)
        assert torch.allclose(found, expected, atol=1e-5)


def test_a_resumed_run_goes_on_with_its_teacher(tmp_path: Path) -> None:
    def run(folder: str, steps: int, resume: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        trainer = make(
            tmp_path / folder, max_steps=steps, save_strategy="steps", save_steps=2, deterministic=True,
            teacher_update_rate=0.3,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        average = teacher_of(trainer).average
        assert average is not None
        return flat(trainer.model), torch.cat([weight.flatten() for weight in average.weights.values()])

    student, teacher = run("whole", 4)
    run("cut", 2)
    assert (tmp_path / "cut" / "checkpoint-2" / f"{TEACHER_NAME}.safetensors").exists()
    resumed_student, resumed_teacher = run("cut", 4, resume=True)
    assert torch.equal(teacher, resumed_teacher) and torch.equal(student, resumed_student)


def test_a_checkpoint_without_the_average_or_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path / "a", teacher_model_kind="live", save_strategy="steps", save_steps=2)
    trainer.train()
    with pytest.raises(ConfigurationError, match="is missing: the checkpoint was written without a moving average"):
        make(tmp_path / "a", max_steps=3).train(resume_from_checkpoint=True)
    average = teacher_of(make(tmp_path / "b")).average
    assert average is not None
    with pytest.raises(ConfigurationError, match="other trained parameters"):
        average.load({"other": torch.zeros(1)})


def test_half_precision_averages_are_kept_in_float32() -> None:
    model = tiny_llama().to(torch.bfloat16)

    average = MovingAverage(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    for _ in range(100):
        average.update(0.05)
    drift = max(
        float((average.weights[name] - weight.detach().float()).abs().max())
        for name, weight in model.named_parameters()
    )
    assert drift < 1e-3, "one hundred small steps arrive"
    with average.active() as teacher:
        assert next(teacher.parameters()).dtype == torch.bfloat16


def test_warnings_start_anew_after_a_good_round(caplog: pytest.LogCaptureFixture) -> None:
    def group(*rewards: float) -> Group:
        from envgrad.types import StopReason, Task

        task = Task(position=0, split="train", environment="e", group_id=1, seed=2)
        episodes = tuple(
            Episode(
                task=task, sibling=number, token_ids=(1, 2), mask=(0, 1), logprobs=(0.0, 0.0), versions=(0, 0),
                prompt_length=1, messages=(), turns=(), stop_reason=StopReason.ANSWER, reward=reward,
            )
            for number, reward in enumerate(rewards)
        )  # fmt: skip
        return Group(task=task, episodes=episodes)

    good = {"self_distillation/reprompt_sample_fraction": 1.0, "self_distillation/success_group_fraction": 1.0}
    watch = Diagnostics(interval=10, tolerance=1e-8)
    with caplog.at_level(logging.WARNING, "envgrad.training.teacher"):
        for rewards in ((1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)):
            watch.observe([group(*rewards)], good)
        assert len(caplog.records) == 2
        Diagnostics(interval=0, tolerance=1e-8).observe([group(0.0, 0.0)], good)
        assert len(caplog.records) == 2


@pytest.mark.parametrize("adapters", [False, True])
def test_half_precision_runs_in_accelerates_autocast(tmp_path: Path, adapters: bool) -> None:
    """The teacher must not put another forward around accelerate's, which casts."""
    kept: list[bool] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept.append(isinstance(vars(kwargs["model"]).get("forward"), PolicyForward))

    lora = LoraConfig(**(LORA | {"target_modules": ["q_proj", "lm_head"]})) if adapters else None
    model = tiny_llama() if adapters else tiny_llama().to(torch.bfloat16)
    trainer = make(tmp_path, model, peft_config=lora, bf16=True, callbacks=[Watch()], distillation_mode="full_logits")
    trainer.train()
    assert kept == [False, False] and torch.isfinite(flat(trainer.model).float()).all()
