from __future__ import annotations

import json
from pathlib import Path

import pytest

from envgrad.config import RolloutConfig
from envgrad.config.mixture import EnvironmentOptions, check_environment_names, environment_options
from envgrad.environments.curriculum import CurriculumOptions
from envgrad.errors import ConfigurationError


def config(tmp_path: Path, **changes: object) -> RolloutConfig:
    options = {"per_device_train_batch_size": 16, "num_generations": 8, "use_cpu": True}
    return RolloutConfig(output_dir=str(tmp_path), **(options | changes))  # type: ignore[arg-type]


def test_options_of_one_environment_replace_those_of_the_run(tmp_path: Path) -> None:
    own = {"num_generations": 4, "max_turns": None, "temperature": 0.5, "tool_timeout": 2}
    given = config(tmp_path, max_turns=8, max_completion_length=99, environment_options={"chess": own, "go": {}})
    found = environment_options(given)
    assert found["chess"] == EnvironmentOptions(
        num_generations=4, max_completion_length=99, max_turns=None, max_turn_tokens=None, episode_timeout=None,
        tool_timeout=2, temperature=0.5,
    )  # fmt: skip
    assert found["go"] == EnvironmentOptions.of_run(given)
    assert found["go"].tool_timeout == 60.0 and found["go"].max_turns == 8


def test_rounds_of_tool_calls_are_turns_for_all_environments(tmp_path: Path) -> None:
    given = config(tmp_path, max_tool_calling_iterations=3, environment_options={"a": {"temperature": 0.5}})
    assert environment_options(given)["a"].max_turns == 4


def test_they_may_come_as_json(tmp_path: Path) -> None:
    own = {"a": {"max_turns": 3}}
    assert config(tmp_path, environment_options=json.dumps(own)).environment_options == own
    assert environment_options(config(tmp_path)) == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{", "environment_options='{' is not JSON"),
        ([], r"environment_options=\[\] must be a mapping"),
        ({"a": 3}, r"environment_options\['a'\]=3 must be a mapping of options"),
        ({"a": {"max_turn": 3}}, r"has no option 'max_turn' \(did you mean 'max_turns'\?\); the options are num_gen"),
        ({"a": {"top_p": 0.5}}, r"has no option 'top_p'; the options are"),
        ({"a": {"max_turns": 0}}, r"\['a'\]\['max_turns'\]=0 must be at least 1"),
        ({"a": {"max_turns": 2.5}}, r"=2\.5 must be a whole number, or None for no limit"),
        ({"a": {"max_turn_tokens": True}}, "=True must be a whole number, or None"),
        ({"a": {"max_completion_length": None}}, "=None must be a whole number$"),
        ({"a": {"temperature": 0}}, r"\['temperature'\]=0 must be above 0"),
        ({"a": {"temperature": "hot"}}, "='hot' must be a number$"),
        ({"a": {"tool_timeout": float("nan")}}, "=nan must be above 0"),
        ({"a": {"num_generations": 1}}, r"\['num_generations'\]=1 must be at least 2; a group needs a sibling"),
    ],
)
def test_what_cannot_work(tmp_path: Path, options: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        config(tmp_path, environment_options=options)


def test_sizes_that_differ_need_steps_of_whole_groups(tmp_path: Path) -> None:
    sizes = {"environment_options": {"a": {"num_generations": 4}}}
    halves = {"per_device_train_batch_size": 4, "steps_per_generation": 4}
    assert config(tmp_path, **sizes).episodes_per_step == 16
    with pytest.raises(ConfigurationError, match=r"=4 differs from num_generations=8, .* its 4 episodes"):
        config(tmp_path, **sizes, **halves)
    config(tmp_path, environment_options={"a": {"num_generations": 8}}, **halves)


def test_the_largest_group_must_fit_what_may_be_in_flight(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_concurrent_episodes=8 must be at least .*\['a'\].*=9"):
        config(tmp_path, max_concurrent_episodes=8, environment_options={"a": {"num_generations": 9}})


def test_names_must_be_of_environments(tmp_path: Path) -> None:
    given = config(tmp_path, environment_options={"ches": {"max_turns": 3}})
    with pytest.raises(ConfigurationError, match=r"names 'ches'.*\(did you mean 'chess'\?\); use one of chess, go"):
        check_environment_names(given, ["chess", "go"], named=True)
    with pytest.raises(ConfigurationError, match="is for named environments: give environment_factory="):
        check_environment_names(given, ["ches"], named=False)
    check_environment_names(given, ["ches"], named=True)
    check_environment_names(config(tmp_path), ["Chess"], named=False)


def test_a_curriculum_and_its_values(tmp_path: Path) -> None:
    assert config(tmp_path).curriculum_options() is None
    assert config(tmp_path, curriculum="variance").curriculum_options() == CurriculumOptions(min_share=0.05, decay=0.9)
    own = config(tmp_path, curriculum="variance", curriculum_min_share=0.2, curriculum_decay=0.5)
    assert own.curriculum_options() == CurriculumOptions(min_share=0.2, decay=0.5)


def test_dynamic_sampling_and_its_bound(tmp_path: Path) -> None:
    assert config(tmp_path).dynamic_rounds() is None
    assert config(tmp_path, dynamic_sampling=True).dynamic_rounds() == 3
    assert config(tmp_path, dynamic_sampling=True, max_dynamic_rounds=7).dynamic_rounds() == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"curriculum": "size"}, "curriculum='size' is not known; choose one of variance"),
        ({"curriculum_min_share": 0.1}, "curriculum_min_share=0.1 acts only with curriculum='variance'"),
        ({"curriculum_decay": 0.1}, "curriculum_decay=0.1 acts only with curriculum='variance'"),
        ({"curriculum": "variance", "curriculum_min_share": 0.0}, "curriculum_min_share=0.0 must be above 0"),
        ({"curriculum": "variance", "curriculum_decay": 1.0}, "curriculum_decay=1.0 must be at least 0 and below 1"),
        ({"max_dynamic_rounds": 2}, "max_dynamic_rounds=2 acts only with dynamic_sampling=True"),
        ({"dynamic_sampling": True, "max_dynamic_rounds": 0}, "max_dynamic_rounds=0 must be at least 1"),
    ],
)
def test_values_that_cannot_act(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        config(tmp_path, **changes)
