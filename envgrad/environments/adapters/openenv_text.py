"""What an OpenEnv server says, for a model to read: its actions as tools or free text, its observations as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from envgrad.environments.boundary import Raised, guard
from envgrad.environments.foreign_tools import foreign_tool, plain_schema
from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvironmentContractError, EnvironmentFailure

Json: TypeAlias = dict[str, Any]
Render: TypeAlias = Callable[[Json], str]

METHOD = "_call"
"""the method of our environments that runs every tool"""
_MCP_TITLES = ("CallToolAction", "ListToolsAction", "Action")
_OF_THE_PROTOCOL = ("done", "reward", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionForm:
    """How a model acts: by tools made from the action's schema, by the environment's own tools, or in free text."""

    text_field: str | None = None
    """the action's field that takes free text"""
    lists_tools: bool = False
    """the session lists its tools (MCP)"""
    tools: tuple[ToolSpec, ...] = ()
    fixed: Mapping[str, Mapping[str, object]] | None = None
    """by tool: fields of the action that tell it from the others"""


def read_action(schema: object, text: str | bool | None, name: str | None) -> ActionForm:
    """How a model acts, by the server's schema of its actions.

    Args:
        schema: JSON schema.
        text: the field that takes the model's text; False: tools in any case; None: text where the action needs one
            string and nothing else, and ``name`` is not given.
        name: of the tool that the action becomes; None: after the action's title, ``GuessAction`` -> ``guess``.

    Raises:
        EnvironmentContractError: no schema of an object, no such field, or a name where there is not one tool.

    Example:
        >>> schema = {"title": "GuessAction", "properties": {"number": {"type": "integer"}, "metadata": {}}}
        >>> [tool.signature for tool in read_action(schema, None, None).tools]
        ['guess(number?: integer)']
    """
    if not isinstance(schema, Mapping):
        raise EnvironmentContractError(f"the server's action schema is {schema!r:.200}; it must be a JSON schema")
    options = schema.get("oneOf") or schema.get("anyOf")
    properties = _fields(plain_schema(schema))
    if not options and _is_mcp(schema, properties):
        if isinstance(text, str) or name is not None:
            given = f"text={text!r}" if isinstance(text, str) else f"tool={name!r}"
            raise EnvironmentContractError(f"{given} cannot act: the environment lists its own tools")
        return ActionForm(lists_tools=True)
    if isinstance(text, str):
        if text not in properties:
            raise EnvironmentContractError(f"text={text!r} is no field of the action, which has {sorted(properties)}")
        return ActionForm(text_field=text)
    if text is None and name is None and not options and (only := _only_text(schema, properties)):
        return ActionForm(text_field=only)
    if options and name is not None:
        raise EnvironmentContractError(f"tool={name!r} cannot act: the action is one of several, each of them a tool")
    if not options:
        return ActionForm(tools=(_tool_of(schema, schema, name),), fixed={})
    return _forms_of_union(schema, options)


def _forms_of_union(schema: Mapping[str, Any], options: object) -> ActionForm:
    tools: list[ToolSpec] = []
    fixed: dict[str, Mapping[str, object]] = {}
    for option in options if isinstance(options, list) else []:
        found = plain_schema({**option, "$defs": schema.get("$defs", {})})
        marks = {key: value["enum"][0] for key, value in _fields(found).items() if len(value.get("enum", ())) == 1}
        title = option.get("title") or str(option.get("$ref", "")).rpartition("/")[2]
        spec = _tool_of({**found, "title": title}, schema, str(next(iter(marks.values()), "")) or None, marks)
        tools.append(spec)
        fixed[spec.name] = marks
    return ActionForm(tools=tuple(tools), fixed=fixed)


def _fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties", {})
    return {key: value for key, value in properties.items() if key != "metadata"}


def _is_mcp(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    return schema.get("title") in _MCP_TITLES and set(properties) <= {"type", "tool_name", "arguments"}


def _only_text(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    required = [key for key in schema.get("required", ()) if key in properties]
    if len(required) != 1:
        return None
    field = properties[required[0]]
    return required[0] if field.get("type") == "string" and "enum" not in field else None


def _tool_of(
    schema: Mapping[str, Any], root: Mapping[str, Any], name: str | None, left_out: Mapping[str, object] | None = None
) -> ToolSpec:
    properties = schema.get("properties", {})
    hidden = {"metadata", *(left_out or ())}
    parameters = {
        "properties": {key: value for key, value in properties.items() if key not in hidden},
        "required": [key for key in schema.get("required", ()) if key not in hidden],
        "$defs": root.get("$defs", {}),
    }
    title = str(schema.get("title", "")).removesuffix("Action")
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in title).strip("_")
    description = " ".join(str(schema.get("description", "")).split())
    return foreign_tool(name or words or "act", description, parameters, method=METHOD)


def listed_tool(tool: Mapping[str, Any]) -> ToolSpec:
    """A tool as MCP lists it.

    Raises:
        EnvironmentContractError: as ``foreign_tool``.

    Example:
        >>> listed_tool({"name": "add", "inputSchema": {"properties": {"a": {"type": "integer"}}}}).signature
        'add(a?: integer)'
    """
    schema = tool.get("inputSchema") or tool.get("input_schema") or {}
    return foreign_tool(tool.get("name", ""), str(tool.get("description") or ""), schema, method=METHOD)


def observation_text(observation: Json, show: str | Render | None) -> str:
    """An observation as a model reads it.

    Args:
        observation: as the server sent it.
        show: a field, or a function from the observation to a text. None: the only field as it is, several as JSON; a
            tool's result in the words of the tool.

    Raises:
        EnvironmentFailure: the observation has no such field, or the function raised.

    Example:
        >>> observation_text({"text": "A room.", "done": False, "reward": None}, None)
        'A room.'
        >>> observation_text({"tool_name": "add", "result": {"content": [{"type": "text", "text": "3"}]}}, None)
        '3'
        >>> observation_text({"x": 1, "legal": ["a"]}, None)
        '{"x": 1, "legal": ["a"]}'
    """
    if callable(show):
        shown = guard(show, observation)
        if isinstance(shown, Raised):
            raise EnvironmentFailure(f"observation={show!r} raised {shown.error!r}") from shown.error
        return str(shown.value)
    if show is not None:
        if show not in observation:
            raise EnvironmentFailure(
                f"observation={show!r} is no field of the observation, which has {sorted(observation)}"
            )
        return _text(observation[show])
    if "tool_name" in observation and "result" in observation:
        return _result_text(observation)
    fields = {key: value for key, value in observation.items() if key not in _OF_THE_PROTOCOL}
    if not fields:
        return ""
    return _text(next(iter(fields.values())) if len(fields) == 1 else fields)


def _result_text(observation: Json) -> str:
    error = observation.get("error")
    if error:
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    result = observation["result"]
    content = result.get("content") if isinstance(result, dict) else None
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return "\n".join(str(block.get("text", f"({block.get('type', 'unknown')} content)")) for block in content)
    return _text(result)


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def new_part(before: str, now: str) -> str:
    """What a text has beyond the one before, where each repeats all that came earlier.

    Example:
        >>> new_part("Guess.", "Guess.\\nHigher."), new_part("Guess.", "You won.")
        ('Higher.', 'You won.')
    """
    return now[len(before) :].lstrip("\n") if before and now.startswith(before) else now
