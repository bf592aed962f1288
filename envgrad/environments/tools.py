"""Method -> JSON schema -> checked call -> text.

Schemas are those of ``transformers.utils.get_json_schema`` (see ``hints``), so a chat template sees what it knows; a
missing docstring or argument description is left empty instead of being an error. A call is checked against its schema
before any user code runs: what does not fit comes back as the text of a ``ToolCallError``, for the model to read.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import json
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from envgrad.environments.arguments import clean_text, describe, fit, shorten
from envgrad.environments.boundary import is_async
from envgrad.environments.hints import HintError, Schema, described, hint_schema, read_doc
from envgrad.errors import ConfigurationError, EnvironmentContractError, ToolCallError

_MEDIA = frozenset({"image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio", "file"})
_schemas: weakref.WeakKeyDictionary[Callable[..., object], dict[str, Schema]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as the model sees it and as it is called.

    Example:
        >>> def guess(number: int, hint: bool = False) -> str:
        ...     '''Guess the number.'''
        ...     return "higher"
        >>> spec = build_tool("guess", guess)
        >>> spec.signature
        'guess(number: integer, hint?: boolean)'
        >>> spec.bind(None)(**check_arguments(spec, {"number": 3.0}))
        'higher'
    """

    name: str
    schema: Schema = field(hash=False)
    """``{"type": "function", "function": {"name", "description", "parameters", ...}}``"""
    method: str | Callable[..., object]
    """the name of the instance's method, or the callable itself"""
    is_async: bool
    takes_extra: bool = False
    """it has ``**kwargs``: arguments beyond the schema are passed on"""
    none_defaults: frozenset[str] = frozenset()
    """parameters whose default is None: null is accepted for them"""
    enums: Mapping[str, type[enum.Enum]] = field(default_factory=dict, hash=False)
    """parameters annotated with an ``Enum``: the model writes a value, the tool gets the member"""
    by_name: bool = False
    """one ``method`` runs several tools: it gets this one's name first (see ``foreign_tools``)"""

    @property
    def parameters(self) -> Schema:
        """The JSON schema of the arguments object."""
        parameters: Schema = self.schema["function"]["parameters"]
        return parameters

    @property
    def signature(self) -> str:
        """One line for messages: names, JSON types, ``?`` where an argument may be left out."""
        required = self.parameters.get("required", ())
        shown = [
            f"{name}{'' if name in required else '?'}: {describe(schema)}"
            for name, schema in self.parameters["properties"].items()
        ]
        return f"{self.name}({', '.join(shown + ['...'] * self.takes_extra)})"

    def bind(self, instance: object) -> Callable[..., object]:
        """The callable that runs the tool on ``instance``."""
        if not isinstance(self.method, str):
            return self.method
        bound: Callable[..., object] = getattr(instance, self.method)
        return partial(bound, self.name) if self.by_name else bound


def build_tool(name: str, function: Callable[..., object], *, method: str | None = None) -> ToolSpec:
    """The tool ``name`` that calls ``function`` (a function or a bound method), or ``method`` of an instance.

    Raises:
        EnvironmentContractError: a parameter without a type annotation, of a type that JSON cannot carry, or that
            cannot be given by name; the message names tool, parameter and fix.
    """
    signature = _signature(name, function)
    parameters = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise EnvironmentContractError(
                f"tool {name!r}: parameter {parameter.name!r} is positional-only, but tools are called by name: "
                "remove the '/' from its signature."
            )
    hints = _hints(name, function)
    for parameter in parameters:
        if parameter.annotation is parameter.empty or parameter.name not in hints:
            raise EnvironmentContractError(
                f"tool {name!r}: parameter {parameter.name!r} has no type annotation, so its JSON schema is unknown: "
                f"write e.g. '{parameter.name}: str'. (If {name!r} is not meant as a tool, start its name with an "
                "underscore, or mark the real tools with @tool.)"
            )
    schema = _cached_schema(name, function, parameters, hints)
    return ToolSpec(
        name=name,
        schema=schema,
        method=function if method is None else method,
        is_async=is_async(function),
        takes_extra=any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()),
        none_defaults=frozenset(p.name for p in parameters if p.default is None),
        enums={p.name: kind for p in parameters if (kind := _enum_of(hints[p.name])) is not None},
    )


def build_tools(functions: Iterable[Callable[..., object]]) -> tuple[ToolSpec, ...]:
    """Tools from plain functions, each under its own name.

    Raises:
        ConfigurationError: something that is no named function, or two of one name.
    """
    if not isinstance(functions, Iterable) or isinstance(functions, str | Mapping):
        raise ConfigurationError(f"tools must be a list of functions, got {functions!r}: write tools=[function].")
    specs: list[ToolSpec] = []
    for function in functions:
        name = getattr(function, "__name__", None)
        if not callable(function) or not isinstance(name, str) or name == "<lambda>":
            raise ConfigurationError(f"tools must be functions with a name, got {function!r}: define it with 'def'.")
        specs.append(build_tool(name, function))
    return combine_tools(specs, (), where="tools")


def combine_tools(first: Sequence[ToolSpec], second: Sequence[ToolSpec], *, where: str) -> tuple[ToolSpec, ...]:
    """Both tool lists as one.

    Raises:
        EnvironmentContractError: two tools of one name.
    """
    combined = (*first, *second)
    seen: set[str] = set()
    for spec in combined:
        if spec.name in seen:
            raise EnvironmentContractError(f"{where}: two tools are called {spec.name!r}: rename one of them.")
        seen.add(spec.name)
    return combined


def find_tool(name: object, specs: Sequence[ToolSpec]) -> ToolSpec:
    """The tool called ``name``.

    Raises:
        ToolCallError: no name, or an unknown one; its text names the known tools.
    """
    for spec in specs:
        if spec.name == name:
            return spec
    raise ToolCallError(unknown_tool(name, specs))


def unknown_tool(name: object, specs: Sequence[ToolSpec]) -> str:
    """What to tell a model that called a tool that does not exist.

    Example:
        >>> def look() -> str:
        ...     return "a room"
        >>> unknown_tool("loook", [build_tool("look", look)])
        "Unknown tool 'loook'. Did you mean 'look'? Known tools: look()."
    """
    known = f"Known tools: {', '.join(spec.signature for spec in specs)}." if specs else "There are no tools."
    if not isinstance(name, str) or not name:
        return f"The tool call has no tool name. {known}"
    close = difflib.get_close_matches(name[:100], [spec.name for spec in specs], n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return clean_text(f"Unknown tool '{shorten(name)}'.{hint} {known}")


def check_arguments(spec: ToolSpec, arguments: object) -> dict[str, object]:
    """The arguments of a call, as the tool may be given them: a new dict that shares nothing with ``arguments``.

    A string that holds a JSON object is unwrapped (some models encode their arguments twice). Integers are accepted as
    numbers and whole floats (3.0) as integers; there is no other conversion: ``"3"`` is not 3 and true is not 1.

    Raises:
        ToolCallError: the arguments do not fit; the text names the tool, what was wrong, and its signature.

    Example:
        >>> def inc(n: int) -> int:
        ...     return n + 1
        >>> check_arguments(build_tool("inc", inc), {"n": "1", "x": 2})
        Traceback (most recent call last):
        envgrad.errors.ToolCallError: inc: argument 'n' must be an integer, got the string "1"; unexpected argument 'x'. Signature: inc(n: integer)
    """  # noqa: E501 - a doctest's expected line cannot be broken
    try:
        values, problems = _fit_arguments(spec, arguments)
    except RecursionError:
        values, problems = {}, ["the arguments are nested too deeply"]
    if problems:
        raise ToolCallError(clean_text(f"{spec.name}: {'; '.join(problems)}. Signature: {spec.signature}"))
    return values


def _fit_arguments(spec: ToolSpec, arguments: object) -> tuple[dict[str, object], list[str]]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}, [f"the arguments must be a JSON object, got the string {shorten(json.dumps(arguments))}"]
    if not isinstance(arguments, Mapping):
        return {}, [f"the arguments must be a JSON object, got {shorten(_dump(arguments))}"]
    values: dict[str, object] = {}
    problems: list[str] = []
    properties: Mapping[str, Schema] = spec.parameters["properties"]
    for name, schema in properties.items():
        if name not in arguments:
            if name in spec.parameters.get("required", ()):
                problems.append(f"missing argument '{name}' ({describe(schema)})")
            continue
        value = arguments[name]
        if value is None and name in spec.none_defaults:
            values[name] = None
            continue
        values[name], problem = fit(value, schema, f"argument '{name}'")
        if problem is not None:
            problems.append(problem)
        elif name in spec.enums and value is not None:
            values[name] = spec.enums[name](values[name])
    for key, value in arguments.items():
        if not isinstance(key, str) or (key not in properties and not spec.takes_extra):
            problems.append(f"unexpected argument '{shorten(str(key))}'")
        elif key not in properties:
            values[key], _ = fit(value, {}, key)
    return values, problems


def result_text(value: object) -> str:
    """A tool's return value as the text that the model reads.

    Strings stay, None is empty, dicts, lists and tuples become JSON, text blocks are joined, all else is ``str(value)``
    (user code: call it inside the boundary).

    Raises:
        ToolCallError: image, audio or other media blocks (text only).

    Example:
        >>> result_text({"left": 3}), result_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
        ('{"left": 3}', 'ab')
    """
    if isinstance(value, str):
        text = str(value)
    elif value is None:
        text = ""
    elif isinstance(value, dict | list | tuple):
        text = _blocks_text(value) if isinstance(value, list) and _are_blocks(value) else _dump(value)
    else:
        text = str(value)
    return clean_text(text)


def _are_blocks(value: Sequence[object]) -> bool:
    kinds = [item.get("type") if isinstance(item, dict) else None for item in value]
    return bool(kinds) and all(isinstance(kind, str) and (kind == "text" or kind in _MEDIA) for kind in kinds)


def _blocks_text(blocks: Sequence[Mapping[str, object]]) -> str:
    for block in blocks:
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            raise ToolCallError(f"the tool returned content of type {block['type']!r}; only text can be shown.")
    return "".join(str(block["text"]) for block in blocks)


def _dump(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return f"({type(value).__name__}, nested too deeply to show)"
    except (TypeError, ValueError):  # keys that are not strings, cycles
        return str(value)


def _signature(name: str, function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise EnvironmentContractError(
            f"tool {name!r}: {function!r} has no signature that Python can read ({error}): wrap it in a function."
        ) from error


def _hints(name: str, function: Callable[..., object]) -> dict[str, Any]:
    target = function
    while isinstance(target, partial):
        target = target.func
    if not isinstance(target, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise EnvironmentContractError(
            f"tool {name!r}: its type annotations cannot be resolved ({error}): import the names they use at the top "
            "of the module, outside 'if TYPE_CHECKING'."
        ) from error


def _enum_of(hint: object) -> type[enum.Enum] | None:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = [option for option in options if option is not type(None)]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], enum.Enum):
        return kinds[0]
    return None


def _cached_schema(
    name: str, function: Callable[..., object], parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> Schema:
    key = function.__func__ if isinstance(function, types.MethodType) else function
    if not isinstance(key, types.FunctionType):
        return _build_schema(name, function, parameters, hints)
    schemas = _schemas.setdefault(key, {})
    if name not in schemas:
        schemas[name] = _build_schema(name, function, parameters, hints)
    return schemas[name]


def _build_schema(
    name: str, function: Callable[..., object], parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> Schema:
    doc = read_doc(inspect.getdoc(function) or "")
    properties: dict[str, Schema] = {}
    for parameter in parameters:
        schema = _hint_schema(name, parameter, hints[parameter.name])
        try:
            properties[parameter.name] = described(schema, doc.arguments.get(parameter.name, ""))
        except ValueError as error:
            raise EnvironmentContractError(
                f"tool {name!r}: a '(choices: ...)' list in its docstring is not JSON ({error}): "
                'write it as (choices: ["a", "b"]).'
            ) from error
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    function_schema: Schema = {
        "name": name,
        "description": doc.text,
        "parameters": {"type": "object", "properties": properties} | ({"required": required} if required else {}),
    }
    returned = _return_schema(hints, doc.returns)
    if returned is not None:
        function_schema["return"] = returned
    return {"type": "function", "function": function_schema}


def _hint_schema(name: str, parameter: inspect.Parameter, hint: object) -> Schema:
    try:
        return hint_schema(hint)
    except HintError as error:
        raise EnvironmentContractError(
            f"tool {name!r}: parameter {parameter.name!r} has the type {hint!r}, which JSON cannot "
            "carry: use str, int, float, bool, list, dict, Literal, Enum, or unions of these."
        ) from error


def _return_schema(hints: Mapping[str, Any], text: str | None) -> Schema | None:
    """What the tool returns; None where that is not told, or has no schema, which hinders no call."""
    if "return" not in hints:
        return None
    try:
        schema = hint_schema(hints["return"])
    except HintError:
        return None
    return schema if text is None else schema | {"description": text}
