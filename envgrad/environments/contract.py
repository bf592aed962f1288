"""The environment contract: a class is inspected once, at construction, and becomes an ``EnvironmentSpec``.

Everything that can be known from one probe instance is checked here, by name and with the fix; what depends on a task
(the ``tools`` property, a returned reward) is read through the spec and the readers of ``results``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, replace

from envgrad.environments.boundary import Ok, Raised, guard
from envgrad.environments.closing import call_all_now
from envgrad.environments.isolation import detect_global_draws
from envgrad.environments.members import RESERVED_NAMES, Environment, StepResult, ToolResult, is_marked, tool
from envgrad.environments.results import opening_messages, read_group_rewards, read_reward, read_step
from envgrad.environments.spec import IDENTITY_NAMES, Elsewhere, EnvironmentSpec, Factory, member_of
from envgrad.environments.tools import ToolSpec, build_tool
from envgrad.errors import EnvironmentContractError

__all__ = [
    "IDENTITY_NAMES",
    "RESERVED_NAMES",
    "Environment",
    "EnvironmentSpec",
    "StepResult",
    "ToolResult",
    "inspect_environment",
    "opening_messages",
    "read_group_rewards",
    "read_reward",
    "read_step",
    "tool",
]

_SUPPLIED_NAMES = IDENTITY_NAMES | {"split"}
_PROBE_CLOSE_SECONDS = 10.0


def inspect_environment(
    name: str, factory: Factory, *, columns: frozenset[str] | None = None, routed: bool = False
) -> tuple[EnvironmentSpec, object]:
    """Call ``factory`` once and check the instance against the contract.

    Args:
        name: the environment's name, for messages and tasks.
        factory: a callable without arguments: a class, a closure, a partial.
        columns: the dataset's columns, which ``reset`` may require; empty without a dataset; None if they are unknown.
        routed: the ``environment`` column chooses the environment, and so never reaches ``reset``.

    Returns:
        The spec, and the probe instance, which seeds the instance pool. If a check fails, the probe is closed.

    Raises:
        EnvironmentContractError: what breaks the contract, named with the fix.
    """
    label = f"environment {name!r}" if name else "the environment"
    instance, draws = _construct(label, factory)
    try:
        spec = _inspect_instance(label, name, factory, instance, columns, routed)
        return replace(spec, factory_draws=draws), instance
    except EnvironmentContractError:
        close = member_of(instance, "close") and getattr(instance, "close", None)
        if callable(close):
            call_all_now([close], timeout=_PROBE_CLOSE_SECONDS)
        raise


def _inspect_instance(
    label: str, name: str, factory: Factory, instance: object, columns: frozenset[str] | None, routed: bool
) -> EnvironmentSpec:
    label = f"{label} ({type(instance).__name__})"
    reset = _check_reset(label, instance, columns, routed)
    for reserved in sorted(RESERVED_NAMES - {"step"}):
        if is_marked(member_of(instance, reserved)):
            raise EnvironmentContractError(
                f"{label}: {reserved!r} is a reserved name and carries @tool: remove the mark or rename the method."
            )
    dynamic = member_of(instance, "tools") is not None
    runs_agent = _check_run_agent(label, instance)
    tools = () if dynamic or runs_agent else _static_tools(label, instance)
    step_protocol = not (tools or dynamic or runs_agent) and _has_method(
        label, instance, "step", 1, example="def step(self, message)"
    )
    finite = _has_method(label, instance, "num_tasks", 1, sync=True, example="def num_tasks(cls, split) -> int")
    states = [
        _has_method(label, instance, "state_dict", 0, sync=True, example="def state_dict(self)"),
        _has_method(label, instance, "load_state_dict", 1, sync=True, example="def load_state_dict(self, state)"),
    ]
    if any(states) and not all(states):
        raise EnvironmentContractError(f"{label}: state_dict and load_state_dict go together: define both or neither.")
    return EnvironmentSpec(
        name=name,
        factory=factory,
        reset_names=frozenset(reset.named),
        reset_required=reset.required,
        reset_takes_all=reset.takes_all,
        tools=tools,
        dynamic_tools=dynamic,
        step_protocol=step_protocol,
        runs_agent=runs_agent,
        routed=routed,
        has_done=_check_done(label, instance),
        has_read_chat=_has_method(label, instance, "read_chat", 1, example="def read_chat(self, messages)"),
        has_get_reward=_has_method(label, instance, "get_reward", 0, example="def get_reward(self)"),
        has_group_reward=_check_group_reward(label, instance),
        has_get_feedback=_has_method(label, instance, "get_feedback", 0, example="def get_feedback(self)"),
        has_fork=_has_method(label, instance, "fork", 0, sync=True, example="def fork(self)"),
        has_start_state=_has_method(label, instance, "start_state", 0, sync=True, example="def start_state(self)"),
        elsewhere=isinstance(instance, Elsewhere),
        copies_elsewhere=isinstance(instance, Elsewhere) and instance.may_copy,
        has_state=all(states),
        has_close=_has_method(label, instance, "close", 0, example="def close(self)"),
        num_tasks=_task_counter(label, instance) if finite else None,
        determinism=_check_determinism(label, instance),
    )


def _construct(label: str, factory: object) -> tuple[object, frozenset[str]]:
    """An instance, and the process-global random generators that the factory drew from, which are as before."""
    if not callable(factory):
        raise EnvironmentContractError(
            f"{label}: environment_factory must be callable without arguments, got the {type(factory).__name__} "
            f"{factory!r}: pass the class itself, not an instance, or a function that builds one."
        )
    signature = _signature(factory)
    if signature is not None and not _accepts(signature, 0):
        raise EnvironmentContractError(
            f"{label}: the factory {factory!r} needs arguments {signature}, but it is called without any: "
            "pass functools.partial(...) or a lambda that supplies them."
        )
    calls: list[Ok | Raised] = []
    draws = detect_global_draws(lambda: calls.append(guard(factory)))
    made = calls[0]
    if isinstance(made, Raised) and isinstance(made.error, EnvironmentContractError):
        raise made.error
    if isinstance(made, Raised):
        raise EnvironmentContractError(
            f"{label}: the factory raised {type(made.error).__name__}: {made.error}: it must build an instance "
            "when called without arguments."
        ) from made.error
    if inspect.iscoroutine(made.value):
        made.value.close()
        raise EnvironmentContractError(f"{label}: the factory is async: build in a plain function, connect in reset.")
    if made.value is None or isinstance(made.value, type):
        raise EnvironmentContractError(f"{label}: the factory returned {made.value!r}: it must return an instance.")
    return made.value, draws


@dataclass(frozen=True, slots=True)
class _Reset:
    named: frozenset[str]
    required: frozenset[str]
    takes_all: bool


def _check_reset(label: str, instance: object, columns: frozenset[str] | None, routed: bool) -> _Reset:
    reset = member_of(instance, "reset") and getattr(instance, "reset", None)
    if not callable(reset):
        raise EnvironmentContractError(
            f"{label}: it has no reset method: define 'def reset(self)', which starts an episode, returning its prompt."
        )
    signature = _signature(reset)
    parameters = list(signature.parameters.values()) if signature is not None else []
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise EnvironmentContractError(
                f"{label}: reset's parameter {parameter.name!r} is positional-only, but reset is called by name: "
                "remove the '/'."
            )
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = frozenset(p.name for p in named if p.default is p.empty)
    if columns is not None:
        known = _SUPPLIED_NAMES | (columns - {"environment"} if routed else columns)
        unknown = sorted(required - known)
        if unknown:
            raise EnvironmentContractError(
                f"{label}: reset requires {unknown}, which nothing supplies: it can name {sorted(known)}; give the "
                "parameter a default, or add the column to the dataset."
            )
        if not columns and "task_index" in required and member_of(instance, "num_tasks") is None:
            raise EnvironmentContractError(
                f"{label}: reset requires 'task_index', but without num_tasks the environment is endless and has none: "
                "define 'num_tasks(cls, split)', or name 'seed' instead."
            )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return _Reset(frozenset(p.name for p in named), required, takes_all)


def _static_tools(label: str, instance: object) -> tuple[ToolSpec, ...]:
    cls = type(instance)
    public: list[str] = []
    marked: list[str] = []
    for name in sorted(dir(cls)):
        member = member_of(instance, name)
        if name in RESERVED_NAMES and name != "step":
            continue
        if is_marked(member):
            marked.append(name)
        elif isinstance(member, types.FunctionType | staticmethod) and not name.startswith("_"):
            public.append(name)
    names = marked or (public if public != ["step"] else [])
    specs = []
    for name in names:
        try:
            specs.append(build_tool(name, getattr(instance, name), method=name))
        except EnvironmentContractError as error:
            hint = ""
            if name == "step":
                others = [other for other in names if other != "step"]
                hint = f" ('step' reads free text only in a class without other tools; here {others} are tools.)"
            raise EnvironmentContractError(f"{label}: {error}{hint}") from error
    return tuple(specs)


def _check_run_agent(label: str, instance: object) -> bool:
    """Whether an agent owns the loop. Then public methods are its own business, and declared tools are an error."""
    if not _has_method(label, instance, "run_agent", 1, example="async def run_agent(self, endpoint)"):
        return False
    declared = [name for name in sorted(dir(type(instance))) if is_marked(member_of(instance, name))]
    declared += [name for name in ("tools", "step") if member_of(instance, name) is not None]
    if declared:
        raise EnvironmentContractError(
            f"{label}: run_agent plays the whole episode, so {declared} would never be called: drop them, or drop "
            "run_agent; an agent shows its own tools in its requests."
        )
    return True


def _has_method(label: str, instance: object, name: str, arguments: int, *, example: str, sync: bool = False) -> bool:
    """Whether the optional method ``name`` is there; an error if it cannot be called with ``arguments`` arguments."""
    if member_of(instance, name) is None:
        return False
    method = getattr(instance, name, None)
    if not callable(method):
        raise EnvironmentContractError(
            f"{label}: {name!r} is a reserved name for a method, got {method!r}: write '{example}', or rename it."
        )
    signature = _signature(method)
    if signature is not None and not _accepts(signature, arguments):
        raise EnvironmentContractError(
            f"{label}: {name} is called with {arguments or 'no'} argument{'s' * (arguments != 1)}, but its signature "
            f"is {name}{signature}: write '{example}'."
        )
    if sync and inspect.iscoroutinefunction(method):
        raise EnvironmentContractError(f"{label}: {name} must not be async: write '{example}'.")
    return True


def _check_done(label: str, instance: object) -> bool:
    member = member_of(instance, "done")
    if isinstance(member, types.FunctionType | staticmethod | classmethod):
        method = getattr(instance, "done")  # noqa: B009
        signature = _signature(method)
        if inspect.iscoroutinefunction(method) or (signature is not None and not _accepts(signature, 0)):
            raise EnvironmentContractError(
                f"{label}: done must be an attribute or property, got the method done{signature}: make it a @property, "
                "or rename it if it is a tool."
            )
    return member is not None


def _check_group_reward(label: str, instance: object) -> bool:
    member = member_of(instance, "group_reward")
    if member is not None and not isinstance(member, classmethod):
        raise EnvironmentContractError(
            f"{label}: group_reward must be a classmethod, since it scores all siblings of a group: write "
            "'@classmethod' and 'def group_reward(cls, environments)'."
        )
    return _has_method(label, instance, "group_reward", 1, example="def group_reward(cls, environments)")


def _task_counter(label: str, instance: object) -> Callable[[str], int]:
    cls = type(instance)
    owner = cls if isinstance(member_of(instance, "num_tasks"), classmethod | staticmethod) else instance
    method: Callable[[str], object] = getattr(owner, "num_tasks")  # noqa: B009

    def count(split: str) -> int:
        made = guard(method, split)
        if isinstance(made, Raised):
            raise EnvironmentContractError(
                f"{label}: num_tasks({split!r}) raised {type(made.error).__name__}: {made.error}."
            ) from made.error
        if isinstance(made.value, bool) or not isinstance(made.value, int) or made.value < 0:
            raise EnvironmentContractError(
                f"{label}: num_tasks({split!r}) must return how many tasks there are, got {made.value!r}."
            )
        return made.value

    return count


def _check_determinism(label: str, instance: object) -> str | None:
    if member_of(instance, "determinism") is None:
        return None
    value = getattr(instance, "determinism", None)
    if value is not None and not isinstance(value, str):
        raise EnvironmentContractError(
            f"{label}: 'determinism' is a reserved name for a string or None, got {value!r}: rename the member."
        )
    return value


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none
        return None


def _accepts(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True
