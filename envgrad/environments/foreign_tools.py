"""Tools that somebody else describes by a JSON schema -> tools of ours, on which every instance can be called.

A server's schema says more than our check of arguments reads (bounds, patterns, fields of nested objects): what it says
more is shown to the model and checked by the server alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from envgrad.environments.tools import ToolSpec
from envgrad.errors import EnvironmentContractError

Schema: TypeAlias = Mapping[str, Any]

_KINDS = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_NOTHING: frozenset[str] = frozenset()


def foreign_tool(name: str, description: str, parameters: Schema | None, *, method: str) -> ToolSpec:
    """The tool ``name``, which runs the instance's ``method`` as ``await instance.method(name, **arguments)``.

    Equal descriptions give equal tools, whatever instance they came from: siblings share one opening.

    Args:
        name: as the model calls it.
        description: in words.
        parameters: the JSON schema of the arguments object; None: no arguments.
        method: an async method ``(self, name, /, **arguments)``.

    Raises:
        EnvironmentContractError: no name, or a schema that describes no object.

    Example:
        >>> schema = {"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        ...     "how": {"$ref": "#/$defs/How"}}, "required": ["how"], "$defs": {"How": {"const": "fast"}}}
        >>> tool = foreign_tool("run", "Run.", schema, method="_call")
        >>> tool.signature
        'run(n?: integer or null, how: "fast")'
    """
    if not isinstance(name, str) or not name:
        raise EnvironmentContractError(f"a tool of the server is called {name!r}: it needs a name")
    given = {} if parameters is None else parameters
    root = _resolved(given, given)
    if root.get("type", "object") != "object" or not isinstance(root.get("properties", {}), Mapping):
        raise EnvironmentContractError(f"tool {name!r}: its schema {dict(given)!r:.200} describes no object")
    properties = {str(key): {"description": "", **value} for key, value in root.get("properties", {}).items()}
    required = [key for key in root.get("required", ()) if key in properties]
    function: dict[str, Any] = {
        "name": name,
        "description": description.strip(),
        "parameters": {"type": "object", "properties": properties, **({"required": required} if required else {})},
    }
    return ToolSpec(
        name=name,
        schema={"type": "function", "function": function},
        method=method,
        is_async=True,
        by_name=True,
        takes_extra=given.get("additionalProperties") not in (None, False),
        none_defaults=frozenset(key for key, value in properties.items() if value.get("default", "") is None),
    )


def plain_schema(schema: Schema) -> dict[str, Any]:
    """``schema`` without references, in the words that ``arguments.fit`` reads.

    Example:
        >>> plain_schema({"title": "Cell", "oneOf": [{"type": "string"}, {"const": 3}]})
        {'anyOf': [{'type': 'string'}, {'enum': [3]}]}
    """
    return _resolved(schema, schema)


def _resolved(schema: object, root: Schema, inside: frozenset[str] = _NOTHING) -> dict[str, Any]:
    """``inside``: references that are being followed; within one of them it fits anything, or there would be no end."""
    if not isinstance(schema, Mapping):
        return {}
    node = {key: value for key, value in schema.items() if key not in ("title", "$defs", "definitions")}
    if isinstance(node.get("$ref"), str):
        reference = node.pop("$ref")
        target = None if reference in inside else _target(reference, root)
        return {**_resolved(target, root, inside | {reference}), **_resolved(node, root, inside)}
    for part in node.pop("allOf", ()):
        node = {**_resolved(part, root, inside), **node}
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if not all(choice is None or isinstance(choice, bool | int | float | str) for choice in node.get("enum", ())):
        del node["enum"]
    options = node.pop("anyOf", None) or node.pop("oneOf", None)
    node.pop("oneOf", None)
    node.pop("discriminator", None)
    if options:
        return _with_options(node, [_resolved(option, root, inside) for option in options])
    return _containers(node, root, inside)


def _with_options(node: dict[str, Any], options: list[dict[str, Any]]) -> dict[str, Any]:
    """Options; one beside null is that one, nullable, as schemas of Python functions say it."""
    others = [option for option in options if option.get("type") != "null"]
    if len(others) < len(options):
        node["nullable"] = True
    if len(others) == 1:
        return {**others[0], **node}
    return {**node, "anyOf": others} if others else node


def _containers(node: dict[str, Any], root: Schema, inside: frozenset[str]) -> dict[str, Any]:
    kinds = node.get("type")
    known = [kind for kind in ([kinds] if isinstance(kinds, str) else kinds or ()) if kind in _KINDS]
    node.pop("type", None)
    if known:
        node["type"] = known[0] if len(known) == 1 else known
    elif "properties" in node:
        node["type"] = "object"
    for key in ("items", "additionalProperties"):
        value = node.pop(key, None)
        if isinstance(value, Mapping):
            node[key] = _resolved(value, root, inside)
    if isinstance(node.get("prefixItems"), list):
        node["prefixItems"] = [_resolved(item, root, inside) for item in node["prefixItems"]]
    if isinstance(node.get("properties"), Mapping):
        node["properties"] = {key: _resolved(item, root, inside) for key, item in node["properties"].items()}
    return node


def _target(reference: str, root: Schema) -> object:
    found: object = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
