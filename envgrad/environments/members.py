"""What a user's environment may have: the ``Environment`` protocol, the records it returns and the ``tool`` mark."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from envgrad.errors import EnvironmentContractError

T = TypeVar("T")

TOOL_MARK = "__envgrad_tool__"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What ``step`` may return when an observation alone says too little.

    ``reward`` is this turn's reward (None: no reward this turn); ``done`` ends the episode.

    Example:
        >>> StepResult("You hit the wall.", reward=-0.1).done
        False
    """

    observation: str
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool may return to pay a turn reward along with its text.

    Example:
        >>> ToolResult("3 apples left", reward=0.5).content
        '3 apples left'
    """

    content: object
    reward: float | None = None


class Environment(Protocol):
    """Every member the library knows. A plain class with ``reset`` is enough; all others are optional.

    Each of these names is reserved: it is never a tool (``step`` only beside other tools). Methods may be sync or async
    unless said otherwise; other public methods are the agent's tools.

    Example:
        >>> class Echo:
        ...     def reset(self, seed):
        ...         self.word = f"word{seed % 3}"
        ...         return f"Say {self.word}."
        ...
        ...     def say(self, word: str) -> str:
        ...         self.said = word
        ...         return "heard"
        >>> sorted(RESERVED_NAMES)[:3]
        ['close', 'determinism', 'done']
    """

    determinism: str | None
    """a word on how far the environment repeats itself, kept with the run's records"""

    def reset(self, **kwargs: Any) -> object:
        """Start an episode; named parameters are dataset columns, ``group_id``, ``seed``, ``task_index``, ``split``."""
        ...

    def step(self, message: str) -> object:
        """Read the model's free text: observation, ``(observation, done)`` or ``StepResult``."""
        ...

    def run_agent(self, endpoint: Any) -> object:
        """Play the whole episode: an agent that owns its loop, and asks ``endpoint`` (``agents.AgentEndpoint``)."""
        ...

    def read_chat(self, messages: Sequence[dict[str, Any]]) -> object:
        """Read the finished episode's whole chat, before ``get_reward``: for scores that depend on what was said."""
        ...

    def get_reward(self) -> object:
        """Score the finished episode: a float, a dict of named components, or None if it cannot be scored."""
        ...

    @classmethod
    def group_reward(cls, environments: Sequence[Any]) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """Score the siblings of one group together, one reward each, in their order."""
        ...

    def get_feedback(self) -> object:
        """Words on the finished episode, for algorithms that learn from them."""
        ...

    def close(self) -> object:
        """Give resources back; called exactly once per instance."""
        ...

    def fork(self) -> Any:
        """A new, independent instance in the same state. Sync."""
        ...

    def start_state(self) -> object:
        """The state right after ``reset``, as plain data: siblings' starts are compared by it. Sync."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must keep of the environment between its episodes, as plain JSON. Sync. Instances are
        interchangeable: what they share (a curriculum, say) is what this is for."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave, before the first ``reset`` of a resumed run. Sync."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode has ended: a property or plain attribute (a method without arguments works too)."""
        ...

    @property
    def tools(self) -> Sequence[Callable[..., Any] | str]:
        """The task's tools, read after ``reset``: callables or names of methods. It replaces the public methods."""
        ...

    def num_tasks(self, split: str) -> int:
        """How many tasks ``split`` has: the environment is finite. Sync; usually a classmethod."""
        ...


RESERVED_NAMES: frozenset[str] = frozenset(
    name for name in [*vars(Environment), *vars(Environment).get("__annotations__", {})] if not name.startswith("_")
)
"""The names of the protocol's members; none of them becomes a tool (``step`` does beside other tools)."""


def tool(function: T) -> T:
    """Mark a method as a tool. Once one method of a class carries it, only the marked ones are tools.

    Works on functions, async functions, static methods and class methods, in either order of decorators.

    Raises:
        EnvironmentContractError: it was put on a property or on something that is not a function.

    Example:
        >>> class Lamp:
        ...     def reset(self):
        ...         return "Switch the lamp on."
        ...
        ...     @tool
        ...     def switch(self, on: bool) -> str:
        ...         return "bright" if on else "dark"
        ...
        ...     def helper(self):
        ...         return "not a tool"
        >>> is_marked(Lamp.switch), is_marked(Lamp.helper)
        (True, False)
    """
    target = function.__func__ if isinstance(function, staticmethod | classmethod) else function
    if isinstance(target, property | type) or not callable(target):
        raise EnvironmentContractError(
            f"@tool marks functions and methods, got {function!r}: put it on a method (a property is read, not called)."
        )
    setattr(target, TOOL_MARK, True)
    return function


def is_marked(function: object) -> bool:
    """Whether ``function`` (or what a static or class method wraps) carries ``@tool``."""
    target = function.__func__ if isinstance(function, staticmethod | classmethod) else function
    return getattr(target, TOOL_MARK, False) is True
