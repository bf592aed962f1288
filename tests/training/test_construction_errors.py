"""What cannot work is refused at construction, in one line that says the fix."""

from __future__ import annotations

import pytest

from envgrad import ConfigurationError, EnvironmentContractError, GRPOConfig, GRPOTrainer
from helpers.models import Letters, config, tiny_llama, tokenizer_of


def build(tmp_path, environment=Letters, model=None, **changes):
    return GRPOTrainer(
        model if model is not None else tiny_llama(),
        args=config(tmp_path, **changes),
        environment_factory=environment,
        processing_class=tokenizer_of(),
    )


class NeedsArguments(Letters):
    def __init__(self, level):
        self.level = level


class NoReset:
    def get_reward(self):
        return 1.0


class Unannotated:
    def reset(self):
        return "go"

    def act(self, n):
        """Act.

        Args:
            n: How much.
        """
        return n

    def get_reward(self):
        return 1.0


class NoReward:
    def reset(self):
        return "go"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (None, ["environment_factory"]),
        ({}, ["environment_factory"]),
        (NeedsArguments, ["NeedsArguments", "arguments", "partial"]),
        (Letters(), ["Letters", "class"]),
        (NoReset, ["NoReset", "reset"]),
        (Unannotated, ["act", "n"]),
        (NoReward, ["NoReward", "get_reward"]),
    ],
)
def test_environments(tmp_path, environment, words):
    with pytest.raises(ConfigurationError) as caught:
        build(tmp_path, environment)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": -1}, ["max_steps", "num_tasks"]),
        ({"num_generations": 1}, ["num_generations=1", "2"]),
        ({"num_generations": 3}, ["8", "num_generations=3"]),
        ({"generation_batch_size": 12}, ["generation_batch_size=12", "8"]),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, ["generation_batch_size", "steps_per_generation"]),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, ["steps_per_generation=3"]),
        ({"temperature": 0.0}, ["temperature=0.0"]),
        ({"top_p": 0.0}, ["top_p=0.0"]),
        ({"max_turns": 0}, ["max_turns=0"]),
        ({"max_turns": 5, "max_tool_calling_iterations": 2}, ["max_turns=5", "max_tool_calling_iterations=2"]),
        ({"loss_type": "ppo"}, ["loss_type='ppo'", "dapo"]),
        ({"scale_rewards": "std"}, ["scale_rewards='std'", "group"]),
        ({"delta": 1.1}, ["delta=1.1"]),
        ({"epsilon": 1.0}, ["epsilon=1.0"]),
        ({"group_consistency": "maybe"}, ["group_consistency='maybe'", "require"]),
        ({"isolate_generators": "yes"}, ["isolate_generators='yes'", "always"]),
        ({"tool_timeout": 0}, ["tool_timeout=0"]),
        ({"label_smoothing_factor": 0.1}, ["label_smoothing_factor=0.1"]),
        ({"dataloader_num_workers": 2}, ["dataloader_num_workers=2"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size=True", "max_tokens_per_microbatch"]),
        ({"torch_compile": True}, ["torch_compile=True"]),
        ({"use_liger_kernel": True}, ["use_liger_kernel=True"]),
        ({"neftune_noise_alpha": 5.0}, ["neftune_noise_alpha=5.0"]),
        ({"environment_weights": {"nope": 1.0}}, ["nope"]),
        ({"model_init_kwargs": {"dtype": "float32"}}, ["model_init_kwargs"]),
        ({"chat_template_kwargs": "{broken"}, ["chat_template_kwargs"]),
        ({"tool_parser": "nope"}, ["nope"]),
    ],
)
def test_options(tmp_path, changes, words):
    with pytest.raises(ConfigurationError) as caught:
        build(tmp_path, **changes)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_models(tmp_path):
    for model in (str(tmp_path / "missing"), "./missing", tmp_path):
        with pytest.raises(ConfigurationError, match="model="):
            GRPOTrainer(model, args=config(tmp_path), environment_factory=Letters)
    with pytest.raises(ConfigurationError, match="processing_class"):
        GRPOTrainer(tiny_llama(), args=config(tmp_path), environment_factory=Letters)


def test_a_template_that_cannot_render_tools_is_refused_only_if_there_are_tools(tmp_path):
    class Tooled:
        def reset(self):
            return "go"

        def act(self) -> str:
            """Act."""
            return "x"

        def get_reward(self):
            return 1.0

    bare = tokenizer_of()
    bare.chat_template = None
    with pytest.raises(ConfigurationError, match="chat template"):
        GRPOTrainer(tiny_llama(), args=config(tmp_path), environment_factory=Tooled, processing_class=bare)
    trainer = GRPOTrainer(
        tiny_llama(), args=config(tmp_path, max_steps=1), environment_factory=Letters, processing_class=bare
    )
    assert trainer.train().global_step == 1


def test_a_failed_construction_closes_its_probe_instances(tmp_path):
    class Counted(Letters):
        opened = closed = 0

        def __init__(self):
            type(self).opened += 1

        def close(self):
            type(self).closed += 1

    class Broken(Counted):
        reset = None

    for factory in ({"good": Counted, "bad": Broken}, {"good": Counted}):
        with pytest.raises(ConfigurationError):
            build(tmp_path, factory, max_steps=2 if len(factory) == 2 else -1)
    assert Counted.opened == Counted.closed == 2


def test_contract_errors_are_configuration_errors():
    assert issubclass(EnvironmentContractError, ConfigurationError)
    assert GRPOConfig(output_dir="x", scale_rewards=False).scale_rewards == "none"


def test_rounds_of_tool_calls_are_turns_less_one(tmp_path):
    assert [config(tmp_path, max_tool_calling_iterations=n).max_turns for n in (0, 1, 5)] == [1, 2, 6]
    assert config(tmp_path).max_turns is None, "tokens bound an episode then"


def test_an_environment_cannot_have_the_name_of_a_metric(tmp_path):
    with pytest.raises(ConfigurationError, match="'turns'"):
        build(tmp_path, environment={"turns": Letters, "letters": Letters})
