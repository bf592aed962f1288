from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest

from envgrad import ToolResult, check_environment
from envgrad.environments.adapters.gymnasium import GymnasiumEnvironment
from envgrad.environments.adapters.gymnasium_text import KNOWN, describe
from envgrad.environments.check.report import Determinism, Level
from envgrad.environments.contract import inspect_environment
from envgrad.environments.tools import check_arguments
from envgrad.errors import ConfigurationError, EnvironmentFailure, ToolCallError


@dataclass
class Corridor:
    """From 0 to 3; looks like a Gymnasium environment and is none."""

    place: int = 0
    closed: int = 0
    seeds: list[int] = field(default_factory=list)

    def reset(self, *, seed=None):
        self.place = seed % 2
        self.seeds.append(seed)
        return self.place, {"seed": seed}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        return self.place, -0.25 if self.place < 3 else 1, self.place >= 3, self.place < -1, {}

    def close(self):
        self.closed += 1


def corridor(**options):
    return GymnasiumEnvironment(Corridor, **({"actions": ["left", "right"], "prompt": "Reach 3."} | options))


def test_an_episode_pays_each_step_and_ends_with_the_environment():
    episode = corridor()()
    assert episode.reset(seed=4) == "Reach 3.\n\n0"
    assert episode.act("left") == ToolResult("-1", reward=-0.25)
    assert [episode.act("right").reward for _ in range(3)] == [-0.25] * 3 and not episode.done
    assert episode.act("right") == ToolResult("3\n\nThe episode is over.", reward=1.0)
    assert (episode.terminated, episode.truncated, episode.done, episode.steps) == (True, False, True, 5)
    assert episode.get_reward() == 0.0
    episode.close()
    assert episode._environment.closed == 1


def test_truncation_is_kept_apart():
    episode = corridor(max_steps=3, unfinished_reward=-9)()
    episode.reset(seed=2)
    episode.act("left")
    assert episode.get_reward() == -9.0  # the model stopped here
    assert episode.act("left").content == "-2\n\nThe limit of steps is reached."
    assert (episode.terminated, episode.truncated, episode.get_reward()) == (False, True, 0.0)
    episode.reset(seed=2)
    assert (episode.done, episode.steps) == (False, 0)
    assert [episode.act(a).content.endswith("reached.") for a in ("right", "left", "right")] == [False, False, True]
    episode.reset(seed=3)  # it ends at the very step of the cap: that is its own end
    assert not episode.act("left").content.endswith("reached.")
    episode._environment.place = 2
    episode.act("left"), episode.act("right")
    assert episode.truncated


def test_seeds_fit_every_generator():
    episode = corridor()()
    episode.reset(seed=(1 << 62) + 5)
    assert episode._environment.seeds == [5]


def test_the_action_is_an_enumerated_tool():
    spec, probe = inspect_environment("corridor", corridor())
    (tool,) = spec.tools
    assert tool.schema["function"]["parameters"]["properties"]["action"]["enum"] == ["left", "right"]
    with pytest.raises(ToolCallError, match="left"):
        check_arguments(tool, {"action": "up"})
    assert spec.determinism == "seeded" and spec.has_close and type(probe) is type(spec.factory())


def test_objects_are_copied_and_functions_called():
    shared = Corridor()
    copied, made = GymnasiumEnvironment(shared, actions=["l", "r"]), GymnasiumEnvironment(lambda: shared, actions="lr")
    assert copied()._environment is not shared and made()._environment is shared
    assert copied.__name__ == "Corridor" and copied().reset(seed=0).startswith("You act in the environment Corridor.")


def test_an_own_function_acts_and_an_own_text_shows():
    def jump(distance: float, back: bool = False) -> int:
        """
        Jump.

        Args:
            distance: how far.
            back: the other way.
        """
        return -1 if back or distance < 0 else 1

    factory = GymnasiumEnvironment(Corridor, act=jump, render=lambda place: f"at {place}")
    spec, _ = inspect_environment("corridor", factory)
    assert [tool.signature for tool in spec.tools] == ["jump(distance: number, back?: boolean)"]
    episode = factory()
    assert episode.reset(seed=0).endswith("at 0")
    assert episode.jump(distance=2.0).content == "at 1" and episode.jump(distance=2.0, back=True).content == "at 0"


def test_instances_and_factories_can_be_pickled():
    factory = corridor()
    copy = pickle.loads(pickle.dumps(factory))
    episode = copy()
    episode.reset(seed=1)
    episode.act("right")
    again = pickle.loads(pickle.dumps(episode))
    assert again.act("right").reward == 1.0 and not episode.done


class FourTuple(Corridor):
    def step(self, action):
        return super().step(action)[:4]


class NoInfo(Corridor):
    def reset(self, *, seed=None):
        return 0


def test_another_api_is_a_failure_that_says_what_it_must_be():
    episode = GymnasiumEnvironment(FourTuple, actions="lr")()
    episode.reset(seed=0)
    with pytest.raises(
        EnvironmentFailure, match=r"FourTuple.step returned .*: it must be \(observation, reward, termin"
    ):
        episode.act("l")
    with pytest.raises(EnvironmentFailure, match=r"NoInfo.reset returned 0: it must be \(observation, info\)"):
        GymnasiumEnvironment(NoInfo, actions="lr")().reset(seed=0)


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        (Corridor, {}, "not discrete: give act="),
        (Corridor, {"actions": ["a", "a"]}, "must be 2 different names"),
        (Corridor, {"actions": "lr", "act": len}, "give one"),
        (Corridor, {"actions": "lr", "max_steps": 0}, "max_steps=0"),
        (Corridor, {"actions": "lr", "is_slippery": True}, "are for gymnasium.make"),
        (Corridor, {"actions": "lr", "determinism": "task"}, "must be one of fixed, seeded, none"),
        (Corridor, {"actions": "lr", "render": "human"}, "render='human'"),
        (Corridor, {"actions": "lr", "render": "ansi"}, r"needs an environment with render\(\)"),
        (3, {}, "3 is no environment"),
        (int, {"actions": "lr"}, "which has no reset and step"),
        (lambda: 1 / 0, {"actions": "lr"}, "cannot be made: ZeroDivisionError"),
    ],
)
def test_what_cannot_work_is_said_at_construction(environment, options, words):
    with pytest.raises(ConfigurationError, match=words):
        GymnasiumEnvironment(environment, **options)


def test_an_act_without_a_name_is_refused():
    with pytest.raises(ConfigurationError, match="which becomes the tool's name"):
        inspect_environment("corridor", GymnasiumEnvironment(Corridor, act=lambda force: 1))


def test_the_contract_is_kept():
    report = check_environment(corridor(unfinished_reward=-5.0))
    assert report.determinism is Determinism.SEEDED
    assert not [finding for finding in report.findings if finding.level is not Level.NOTE], report


def test_observations_in_numbers():
    numpy = pytest.importorskip("numpy")
    grid = numpy.array([[0, 1], [2, 3]])
    assert describe(grid) == "0 1\n2 3" and describe(numpy.float32(1 / 3)) == "0.3333" and describe("east") == "east"
    assert describe((numpy.int64(4), True, None)) == "4 yes None" and describe({"a": [0.5], "b": {}}) == "a: 0.5\nb: "


class TestOfGymnasium:
    """With the package itself."""

    gymnasium = pytest.importorskip("gymnasium")

    def test_a_known_game(self):
        lake = GymnasiumEnvironment("FrozenLake-v1", is_slippery=False)
        episode = lake()
        assert episode.reset(seed=1) == f"{KNOWN['FrozenLake'].prompt}\n\n0"
        path = ["down", "down", "right", "right", "down", "right"]
        results = [episode.act(action) for action in path]
        assert [result.reward for result in results] == [0.0] * 5 + [1.0] and episode.terminated
        episode.reset(seed=1)
        episode.act("right"), episode.act("down")
        assert episode.done and episode.observation == 5  # a hole

    def test_its_own_limit_is_truncation(self):
        episode = GymnasiumEnvironment("FrozenLake-v1", is_slippery=False, max_episode_steps=2)()
        episode.reset(seed=1)
        episode.act("left"), episode.act("left")
        assert (episode.terminated, episode.truncated) == (False, True)

    def test_its_text_rendering(self):
        episode = GymnasiumEnvironment("FrozenLake-v1", render="ansi", is_slippery=False)()
        assert episode.reset(seed=1).endswith("FHFH\nFFFH\nHFFG")
        assert "(Down)" in episode.act("down").content

    def test_a_space_that_starts_elsewhere(self):
        class Shifted(Corridor):
            action_space = self.gymnasium.spaces.Discrete(2, start=1)

        episode = GymnasiumEnvironment(Shifted)()
        episode.reset(seed=0)
        assert episode.act(1).content == "1" and episode.act(2).content == "0"

    def test_an_unknown_id(self):
        with pytest.raises(ConfigurationError, match="'Frozen-v9' cannot be made"):
            GymnasiumEnvironment("Frozen-v9")

    def test_continuous_actions_need_a_function(self):
        with pytest.raises(ConfigurationError, match=r"Box\(-2.0, 2.0"):
            GymnasiumEnvironment("Pendulum-v1")
