"""Gymnasium environments, and all that look like them, as environments of text.

::

    GymnasiumEnvironment("FrozenLake-v1")      a factory: picklable, checked when it is made
        () -> GymnasiumEpisode                 an instance around one environment of its own
                 reset(seed)                   -> the prompt and the first observation
                 act(action="left"), ...       -> the observation; pays the step's reward; done

Nothing of gymnasium is imported for an environment that is given as an object or a class: what counts is
``reset(seed=...) -> (observation, info)`` and ``step(action) -> (observation, reward, terminated, truncated, info)``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from envgrad.environments.adapters.extras import require
from envgrad.environments.adapters.gymnasium_text import KNOWN, describe
from envgrad.environments.boundary import Raised, guard
from envgrad.environments.members import ToolResult
from envgrad.errors import ConfigurationError, EnvironmentFailure

SEED_BITS = 32
"""what the generators of all environments take"""
MOST_NAMES = 64
"""actions beyond this are given by number"""


@runtime_checkable
class GymLike(Protocol):
    """What is needed of an environment; ``action_space``, ``render`` and ``close`` are used where they are there."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, Mapping[str, Any]]: ...

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, Mapping[str, Any]]: ...


Given: TypeAlias = str | Callable[[], GymLike] | GymLike
Render: TypeAlias = Callable[[Any], str]
Act: TypeAlias = Callable[..., Any]


class GymnasiumEnvironment:
    """A Gymnasium environment as text and one tool. Pass it as ``environment_factory``.

    Rewards of steps are paid as turn rewards, so the episode's reward is the return. ``terminated`` and ``truncated``
    of an instance say apart how an episode ended; both end it as done, since both are the environment's own word.

    Args:
        environment: an id (``"CartPole-v1"``), a class or function without arguments that makes one, or an object,
            which is copied for each instance.
        render: observation -> text. ``"ansi"``: the environment's own text rendering. None: the observation's numbers.
        act: a function with typed parameters and a docstring, whose return value is the action: it becomes the tool,
            under its name. None: actions are discrete, and the tool is ``act``.
        actions: names of discrete actions, from the first one on. None: known ones, else numbers.
        prompt: what the agent is told before the first observation. None: a known text, else the environment's name.
        max_steps: steps after which an episode is truncated, beside the environment's own limit.
        unfinished_reward: added where the model stops before the environment ends the episode. Where steps cost, give
            what the rest would: stopping at once would else be best.
        determinism: ``"seeded"``; ``"fixed"`` for an environment without chance; ``"none"`` for one that ignores seeds.
        **options: for ``gymnasium.make``.

    Raises:
        ConfigurationError: gymnasium is not installed; an unknown id; an option that cannot act, or does not fit the
            environment's actions.

    Example:
        >>> class Corridor:
        ...     def reset(self, *, seed=None):
        ...         self.place = 0
        ...         return self.place, {}
        ...
        ...     def step(self, action):
        ...         self.place += 1 if action == 1 else -1
        ...         return self.place, float(self.place == 2), self.place == 2, False, {}
        >>> episode = GymnasiumEnvironment(Corridor, actions=["left", "right"], prompt="Reach 2.")()
        >>> episode.reset(seed=1)
        'Reach 2.\\n\\n0'
        >>> episode.act("right"), episode.act("right"), episode.done
        (ToolResult(content='1', reward=0.0), ToolResult(content='2\\n\\nThe episode is over.', reward=1.0), True)
    """

    def __init__(
        self,
        environment: Given,
        *,
        render: Render | Literal["ansi"] | None = None,
        act: Act | None = None,
        actions: Sequence[str] | None = None,
        prompt: str | None = None,
        max_steps: int | None = None,
        unfinished_reward: float = 0.0,
        determinism: str = "seeded",
        **options: object,
    ) -> None:
        if options and not isinstance(environment, str):
            raise ConfigurationError(
                f"{sorted(options)} are for gymnasium.make and cannot act on {environment!r}: give them to it yourself"
            )
        if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1):
            raise ConfigurationError(f"max_steps={max_steps!r} must be an int of at least 1, or None")
        if act is not None and actions is not None:
            raise ConfigurationError("actions names discrete actions and act makes an action of arguments: give one")
        if determinism not in ("fixed", "seeded", "none"):
            raise ConfigurationError(f"determinism={determinism!r} must be one of fixed, seeded, none")
        if not (render is None or render == "ansi" or callable(render)):
            raise ConfigurationError(f"render={render!r} must be a function of the observation, 'ansi', or None")
        self.environment = environment
        self.render = render
        self.act = act
        self.prompt = prompt
        self.max_steps = max_steps
        self.unfinished_reward = float(unfinished_reward)
        self.determinism = determinism
        self.options = options
        if render == "ansi" and isinstance(environment, str):
            self.options = {"render_mode": "ansi", **options}
        known = KNOWN.get(environment.partition("-v")[0]) if isinstance(environment, str) else None
        self.about = known.prompt if known is not None else f"You act in the environment {self.__name__}."
        probe = self.make()
        self.numbers, self.names = _discrete(probe, actions, known.actions if known is not None else None, act)
        if render == "ansi" and not callable(getattr(probe, "render", None)):
            raise ConfigurationError(f"render='ansi' needs an environment with render(); {self.__name__} has none")
        _close(probe)
        self._kind: type[GymnasiumEpisode] | None = None

    @property
    def __name__(self) -> str:
        """The id without its version, or the class's name."""
        if isinstance(self.environment, str):
            return self.environment.rpartition("/")[2].partition("-v")[0]
        return str(getattr(self.environment, "__name__", type(self.environment).__name__))

    def __repr__(self) -> str:
        return f"GymnasiumEnvironment({self.environment!r})"

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_kind": None}

    def __call__(self) -> GymnasiumEpisode:
        """An instance with an environment of its own."""
        return self.kind()(self)

    def kind(self) -> type[GymnasiumEpisode]:
        """The class of the instances, which has their tool: one for all, so that their tools are equal."""
        if self._kind is None:
            tool = _tool_of(self)
            members = {tool.__name__: tool, "determinism": self.determinism, "__module__": __name__}
            self._kind = type("GymnasiumEpisode", (GymnasiumEpisode,), members)
        return self._kind

    def make(self) -> GymLike:
        """A new environment.

        Raises:
            ConfigurationError: it cannot be made.
        """
        given = self.environment
        if isinstance(given, str):
            package = require("gymnasium", extra="gymnasium", what="GymnasiumEnvironment")
            made = guard(package.make, given, **self.options)
        elif isinstance(given, type) or not isinstance(given, GymLike):
            if not callable(given):
                raise ConfigurationError(
                    f"{given!r} is no environment: give an id, a class, a function that makes one, or an object with "
                    "reset and step"
                )
            made = guard(given)
        else:
            made = guard(copy.deepcopy, given)
        if isinstance(made, Raised):
            raise ConfigurationError(f"{given!r} cannot be made: {type(made.error).__name__}: {made.error}") from (
                made.error
            )
        if not isinstance(made.value, GymLike):
            raise ConfigurationError(f"{given!r} made {made.value!r}, which has no reset and step")
        return made.value

    def text(self, environment: GymLike, observation: object) -> str:
        """The observation as the agent reads it."""
        if self.render is None:
            return describe(observation)
        if isinstance(self.render, str):
            return str(environment.render()).rstrip()  # type: ignore[attr-defined]
        return str(self.render(observation))


class GymnasiumEpisode:
    """One episode in play. Its class has the tool, made once by the factory."""

    def __init__(self, factory: GymnasiumEnvironment) -> None:
        self._factory = factory
        self._environment = factory.make()
        self._first: object = None
        self.observation: Any = None
        self.info: Mapping[str, Any] = {}
        self.steps = 0
        self.terminated = False
        self.truncated = False

    def reset(self, seed: int) -> str:
        returned: object = self._environment.reset(seed=seed % (1 << SEED_BITS))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise EnvironmentFailure(f"{self._name}.reset returned {returned!r}: it must be (observation, info)")
        self.observation, self.info = returned
        self._first = returned
        self.steps, self.terminated, self.truncated = 0, False, False
        prompt = self._factory.about if self._factory.prompt is None else self._factory.prompt
        return f"{prompt}\n\n{self._factory.text(self._environment, self.observation)}"

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    def get_reward(self) -> float:
        """What is paid beside the steps: for an episode that the model did not play to its end."""
        return 0.0 if self.done else self._factory.unfinished_reward

    def start_state(self) -> object:
        """The first observation, and where the environment's own generator stands."""
        generator = getattr(getattr(self._environment, "unwrapped", None), "np_random", None)
        return {"start": self._first, "generator": getattr(getattr(generator, "bit_generator", None), "state", None)}

    def close(self) -> None:
        _close(self._environment)

    def __reduce__(self) -> tuple[Callable[..., GymnasiumEpisode], tuple[GymnasiumEnvironment, dict[str, object]]]:
        """Its class is the factory's own, so it is made anew there."""
        return _restored, (self._factory, dict(vars(self)))

    @property
    def _name(self) -> str:
        return self._factory.__name__

    def _act(self, action: object) -> ToolResult:
        returned: object = self._environment.step(action)
        if not isinstance(returned, tuple) or len(returned) != 5:
            raise EnvironmentFailure(
                f"{self._name}.step returned {returned!r}: it must be (observation, reward, terminated, truncated, "
                "info)"
            )
        self.observation, reward, terminated, truncated, self.info = returned
        self.steps += 1
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        limit = self._factory.max_steps
        if not self.terminated and limit is not None and self.steps >= limit:
            self.truncated = True
        text = self._factory.text(self._environment, self.observation)
        if self.done:
            text += "\n\nThe episode is over." if self.terminated else "\n\nThe limit of steps is reached."
        return ToolResult(text, reward=float(reward))


def _restored(factory: GymnasiumEnvironment, state: Mapping[str, object]) -> GymnasiumEpisode:
    kind = factory.kind()
    episode = kind.__new__(kind)
    vars(episode).update(state)
    return episode


def _close(environment: object) -> None:
    close = getattr(environment, "close", None)
    if callable(close):
        close()


def _discrete(
    environment: GymLike, given: Sequence[str] | None, known: Sequence[str] | None, act: Act | None
) -> tuple[range, tuple[str, ...] | None]:
    """The environment's discrete actions and their names, if they have some; nothing where there is ``act``."""
    if act is not None:
        return range(0), None
    space = getattr(environment, "action_space", None)
    count, first = getattr(space, "n", None), int(getattr(space, "start", 0))
    if space is None and given is not None:
        count = len(given)
    if count is None or getattr(count, "shape", ()) != ():
        raise ConfigurationError(
            f"the actions of {environment!r} are {space!r}, not discrete: give act=, a function that makes an action "
            "of the tool's arguments"
        )
    numbers = range(first, first + int(count))
    if given is not None and (len(given) != len(numbers) or len(set(given)) != len(given)):
        raise ConfigurationError(f"actions={list(given)!r} must be {len(numbers)} different names")
    names = given if given is not None else known if known is not None and len(known) == len(numbers) else None
    return numbers, None if names is None else tuple(names)


def _tool_of(factory: GymnasiumEnvironment) -> Callable[..., ToolResult]:
    """The method that acts: ``act`` over discrete actions, or the user's function."""
    numbers, names = factory.numbers, factory.names
    if factory.act is not None:
        return _tool_from(factory.act)
    by_name = dict(zip(names or (), numbers, strict=False))

    def act(self: GymnasiumEpisode, action: Any) -> ToolResult:
        return self._act(by_name[action] if names is not None else numbers[numbers.index(action)])

    if names is not None or len(numbers) <= MOST_NAMES:
        kind: object = Literal[tuple(names or numbers)]
        about = "One of the names." if names is not None else "One of the numbers."
    else:
        kind, about = int, f"A number from {numbers[0]} to {numbers[-1]}."
    act.__annotations__ = {"action": kind, "return": ToolResult}
    act.__doc__ = f"Act in the environment.\n\nArgs:\n    action: {about}\n\nReturns:\n    What is observed then."
    return act


def _tool_from(function: Act) -> Callable[..., ToolResult]:
    """A method with ``function``'s name, parameters and words."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier() or name.startswith("_"):
        raise ConfigurationError(f"act={function!r} must be a function with a name, which becomes the tool's name")

    def method(self: GymnasiumEpisode, **arguments: object) -> ToolResult:
        return self._act(function(**arguments))

    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.__annotations__ = dict(getattr(function, "__annotations__", {}))
    method.__doc__ = function.__doc__
    method.__name__ = method.__qualname__ = name
    return method
