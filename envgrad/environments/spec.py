"""What the library knows about an environment class: the record that everything after construction reads."""

from __future__ import annotations

import asyncio
import copy
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from envgrad.environments.members import RESERVED_NAMES, Environment
from envgrad.environments.tools import ToolSpec, build_tool, combine_tools
from envgrad.errors import EnvironmentContractError
from envgrad.types import Task

Factory: TypeAlias = Callable[[], object]

IDENTITY_NAMES = frozenset({"group_id", "seed", "task_index"})
"""Names that make ``reset`` draw one task per group by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """What the library knows about an environment class before the first task.

    Example:
        >>> class Coin:
        ...     def reset(self, seed):
        ...         self.side = "heads" if seed % 2 else "tails"
        ...         return "Heads or tails?"
        ...
        ...     def call(self, side: str) -> str:
        ...         return "right" if side == self.side else "wrong"
        >>> from envgrad.environments.contract import inspect_environment
        >>> spec, probe = inspect_environment("coin", Coin)
        >>> spec.uses_task_identity, [tool.signature for tool in spec.tools]
        (True, ['call(side: string)'])
        >>> spec.reset_arguments(Task(position=0, split="train", environment="coin", group_id=1, seed=7))
        {'seed': 7}
    """

    name: str
    factory: Factory
    reset_names: frozenset[str]
    """the parameters that ``reset`` names"""
    reset_required: frozenset[str] = frozenset()
    """those of them without a default"""
    reset_takes_all: bool = False
    """``reset`` has ``**kwargs``"""
    tools: tuple[ToolSpec, ...] = ()
    """the tools that do not depend on the task, in alphabetical order"""
    dynamic_tools: bool = False
    """there is a ``tools`` member: ``tools_of`` reads it after ``reset``"""
    shared_tools: tuple[ToolSpec, ...] = ()
    """functions beside the environment's own tools; among ``tools`` already, added to those of a ``tools`` member"""
    stateless: bool = False
    """no environment was given: the dataset's prompts are all there is"""
    step_protocol: bool = False
    """``step`` reads the model's free text"""
    runs_agent: bool = False
    """``run_agent`` plays whole episodes: an agent owns the loop"""
    routed: bool = False
    """the dataset's ``environment`` column chose this environment, so ``reset`` does not get it"""
    has_done: bool = False
    """``done`` was there at construction (it may come later: ``read_done`` always works)"""
    has_read_chat: bool = False
    has_get_reward: bool = False
    has_group_reward: bool = False
    has_get_feedback: bool = False
    has_fork: bool = False
    has_start_state: bool = False
    elsewhere: bool = False
    """instances live in other processes, with random generators of their own"""
    copies_elsewhere: bool = False
    """it lives in another process (``Elsewhere``), and siblings may be copies of it made there"""
    has_state: bool = False
    """``state_dict`` and ``load_state_dict``"""
    has_close: bool = False
    factory_draws: frozenset[str] = frozenset()
    """the process-global random generators that the factory's first call drew from: see ``isolation``"""
    num_tasks: Callable[[str], int] | None = None
    determinism: str | None = None

    def isolation_mode(self, mode: str) -> str:
        """``mode`` of ``isolate_generators``; ``off`` where no generator of this process is drawn from in episodes."""
        return "off" if self.elsewhere and not self.shared_tools else mode

    @property
    def label(self) -> str:
        """How messages call this environment."""
        return f"environment {self.name!r}" if self.name else "the environment"

    @property
    def uses_task_identity(self) -> bool:
        """Whether ``reset`` names ``group_id``, ``seed`` or ``task_index``; ``**kwargs`` is not naming."""
        return bool(self.reset_names & IDENTITY_NAMES)

    @property
    def must_reward(self) -> bool:
        """Whether the environment scores every episode itself."""
        return self.has_get_reward or self.has_group_reward

    @property
    def may_reward(self) -> bool:
        """Whether a reward can come from the environment at all: tools and ``step`` may pay for a turn."""
        return self.must_reward or self.step_protocol or self.dynamic_tools or bool(self.tools)

    def reset_arguments(self, task: Task) -> dict[str, object]:
        """What ``reset`` gets for ``task``: the row's columns and the identity, as far as it names them.

        Lists, dicts and arrays of the row are copied, so that one sibling's changes never reach another.

        Raises:
            EnvironmentContractError: the row lacks a column that ``reset`` requires.
        """
        given: dict[str, object] = dict(task.row or {})
        if self.routed:
            given.pop("environment", None)
        given |= {"group_id": task.group_id, "seed": task.seed, "task_index": task.task_index, "split": task.split}
        missing = sorted(self.reset_required - given.keys())
        if missing:
            raise EnvironmentContractError(
                f"{self.label}: reset requires {missing}, but the row of task {task.key} has only the columns "
                f"{sorted(task.row or {})}: add the column, or give the parameter a default."
            )
        if not self.reset_takes_all:
            given = {name: value for name, value in given.items() if name in self.reset_names}
        if task.task_index is None and "task_index" not in self.reset_required and not self.reset_takes_all:
            given.pop("task_index", None)  # its default says more than None
        return {name: copied(value) for name, value in given.items()}

    def tools_of(self, instance: object) -> tuple[ToolSpec, ...]:
        """The tools of the task that ``instance`` was reset to. It reads user code: call it inside the boundary.

        Raises:
            EnvironmentContractError: ``tools`` holds something that is no tool.
        """
        if member_of(instance, "tools") is None:
            return self.tools
        declared = getattr(instance, "tools")  # noqa: B009 - any object may be an environment
        if callable(declared):
            declared = declared()
        if declared is None:
            return self.tools
        if isinstance(declared, str | bytes) or not isinstance(declared, Iterable):
            raise EnvironmentContractError(
                f"{self.label}: tools must be a list of functions, methods or method names, got {declared!r}."
            )
        specs = [self._dynamic_tool(instance, entry) for entry in declared]
        return combine_tools(specs, self.shared_tools, where=f"{self.label}: tools")

    def with_tools(self, shared: tuple[ToolSpec, ...]) -> EnvironmentSpec:
        """The same environment with functions as tools beside its own.

        Raises:
            EnvironmentContractError: a name is taken, or the environment reads free text and so calls no tools.
        """
        if shared and self.step_protocol:
            raise EnvironmentContractError(
                f"{self.label}: its step(message) reads the model's free text, so tools={[t.name for t in shared]} can "
                "never be called: give the class tools instead of step, or drop tools."
            )
        if shared and self.runs_agent:
            raise EnvironmentContractError(
                f"{self.label}: its run_agent shows tools of its own, so tools={[t.name for t in shared]} can never be "
                "called: drop tools."
            )
        where = f"{self.label} and tools="
        return replace(self, tools=combine_tools(self.tools, shared, where=where), shared_tools=shared)

    def _dynamic_tool(self, instance: object, entry: object) -> ToolSpec:
        if isinstance(entry, ToolSpec):  # a server's, say: see foreign_tools
            return entry
        function = getattr(instance, entry, None) if isinstance(entry, str) else entry
        name = entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)
        if not callable(function):
            raise EnvironmentContractError(
                f"{self.label}: tools names {entry!r}, which is no method: list functions, methods or their names."
            )
        if name in RESERVED_NAMES - {"step"}:
            raise EnvironmentContractError(
                f"{self.label}: tools lists {name!r}, a reserved name that is never a tool: rename the method."
            )
        own = isinstance(function, types.MethodType) and function.__self__ is instance and hasattr(instance, name)
        return build_tool(name, function, method=name if own else None)

    def read_done(self, instance: object) -> bool:
        """Whether ``instance`` says that its episode is over. It reads user code: call it inside the boundary.

        Raises:
            EnvironmentContractError: ``done`` is neither true nor false.
        """
        value = getattr(instance, "done", None)
        if callable(value):
            value = value()
        if value is None:
            return False
        if isinstance(value, int) or getattr(value, "shape", None) == ():  # numpy's and torch's booleans too
            return bool(value)
        if inspect.iscoroutine(value):
            value.close()
        raise EnvironmentContractError(f"{self.label}: done must be true or false, got {value!r}.")


class Elsewhere:
    """Base of what stands for an environment in another process: to copy it means to copy that one."""

    may_copy: bool = False
    """whether siblings of a group may be copies, as far as its class tells"""
    copy_safe: bool = False
    """whether ``copy.deepcopy`` of the environment makes an independent one, as it was found after its ``reset``"""

    @property
    def process_lost(self) -> bool:
        """Whether this one is of no use any more: that process has ended, or a call's cleaning up there was cut."""
        return False

    @property
    def _call_ending(self) -> asyncio.Future[None] | None:
        """Done when the last call that was cancelled has ended there, or the process has."""
        return None


def member_of(instance: object, name: str) -> object | None:
    """The member as it is stored (no property is run); None if there is none or only the protocol's own."""
    member: object | None = inspect.getattr_static(instance, name, None)
    return None if member is not None and member is vars(Environment).get(name) else member


def copied(value: object) -> object:
    """A copy of the value's containers and arrays; what they hold otherwise is shared."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copied(item) for item in value)  # type: ignore[attr-defined, call-arg]
    return copy.copy(value) if isinstance(value, bytearray) or type(value).__module__ == "numpy" else value
