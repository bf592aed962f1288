"""How an environment is made, as plain data that a run's record can hold: an import path and arguments.

::

    Compass                          {"path": "envgrad.starter.compass:Compass"}
    Door, of a script                {"path": "/home/me/train.py:Door"}
    functools.partial(Door, 3)       {"path": "doors:Door", "args": [3], "kwargs": {}}
    Doors(keys=2), a factory object  {"path": "doors:Doors", "args": [], "kwargs": {"keys": 2}, "call": true}
    a lambda, a local class          {"unknown": "<lambda> has no name that can be imported"}
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from envgrad.errors import ConfigurationError


def describe_factory(factory: object) -> dict[str, Any] | None:
    """``factory`` as plain data; None for none.

    Example:
        >>> from envgrad.starter.compass import Compass
        >>> describe_factory(Compass)
        {'path': 'envgrad.starter.compass:Compass'}
        >>> describe_factory(lambda: Compass())
        {'unknown': '<lambda> has no name that can be imported'}
    """
    if factory is None:
        return None
    if isinstance(factory, functools.partial):
        return _with_arguments(describe_factory(factory.func), list(factory.args), dict(factory.keywords), call=False)
    named = _path(factory)
    if named is not None:
        return named
    if inspect.isroutine(factory) or inspect.isclass(factory):
        return {"unknown": f"{getattr(factory, '__qualname__', factory)} has no name that can be imported"}
    arguments = _constructor_arguments(factory)
    if arguments is None:
        return {"unknown": f"a {type(factory).__name__}, whose arguments are not known"}
    return _with_arguments(_path(type(factory)), [], arguments, call=True)


def load_factory(described: Mapping[str, Any]) -> Callable[[], object]:
    """The factory that ``describe_factory`` described.

    Raises:
        ConfigurationError: it is not known, or cannot be imported.

    Example:
        >>> load_factory({"path": "envgrad.starter.compass:Compass"}).__name__
        'Compass'
    """
    if "path" not in described:
        raise ConfigurationError(f"the run's record does not tell how the environment is made: {described['unknown']}")
    found = _import(described["path"], described.get("folder"))
    if "kwargs" not in described:
        return found
    if described["call"]:
        made: Callable[[], object] = found(*described["args"], **described["kwargs"])
        return made
    return functools.partial(found, *described["args"], **described["kwargs"])


def _path(value: object) -> dict[str, Any] | None:
    """Where ``value`` is found again; None if it is not."""
    name, module = getattr(value, "__qualname__", None), sys.modules.get(getattr(value, "__module__", None) or "")
    if isinstance(name, str) and module is not None:
        found = _follow(module, name)
        if found is value or (inspect.ismethod(value) and found == value):  # a bound method is made anew each time
            return _place(module, name)
    # An object has no name of its own, but the script that made it may have given it one.
    main = sys.modules["__main__"]
    given = next((key for key, held in vars(main).items() if held is value and not key.startswith("_")), None)
    return None if given is None or inspect.isclass(value) else _place(main, given)


def _place(module: ModuleType, name: str) -> dict[str, Any] | None:
    if module.__name__ == "__main__":
        script = getattr(module, "__file__", None)
        return None if script is None else {"path": f"{Path(script).resolve()}:{name}"}
    return {"path": f"{module.__name__}:{name}"} | _folder_of(module)


def _follow(value: object, name: str) -> object:
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _folder_of(module: ModuleType) -> dict[str, str]:
    """The folder that a module of the user's is imported from; none for an installed one."""
    place = getattr(module, "__file__", None)
    if place is None or "site-packages" in place or module.__name__.partition(".")[0] == "envgrad":
        return {}
    depth = module.__name__.count(".") + (Path(place).name == "__init__.py")
    return {"folder": str(Path(place).resolve().parents[depth])}


def _constructor_arguments(value: object) -> dict[str, Any] | None:
    """What ``value`` was made with, where it keeps that under the names of its parameters; else None."""
    try:
        parameters = inspect.signature(type(value)).parameters.values()
    except (TypeError, ValueError):
        return None
    kept = getattr(value, "__dict__", {})
    if dataclasses.is_dataclass(value):
        kept = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL or parameter.name not in kept:
            return None
        held = kept[parameter.name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= held
        elif not (type(held) is type(parameter.default) and held == parameter.default):
            arguments[parameter.name] = held
    return arguments


def _with_arguments(
    described: Mapping[str, Any] | None, args: list[Any], kwargs: dict[str, Any], *, call: bool
) -> dict[str, Any]:
    if described is None or "path" not in described or "kwargs" in described:
        return {"unknown": "its class has no name that can be imported"}
    try:
        same = json.loads(json.dumps([args, kwargs])) == [args, kwargs]
    except (TypeError, ValueError):
        same = False
    if not same:
        return {"unknown": f"{described['path']} got arguments that JSON does not hold"}
    return {**described, "args": args, "kwargs": kwargs, "call": call}


def _import(path: str, folder: str | None) -> Callable[..., Any]:
    place, _, name = path.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, folder)
    except (ImportError, OSError) as error:
        raise ConfigurationError(f"{path}, which the run's record names, cannot be imported: {error}") from error
    found = _follow(module, name)
    if not callable(found):
        raise ConfigurationError(f"{path}, which the run's record names, is not there any more")
    return found


def _load_module(name: str, folder: str | None) -> ModuleType:
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """A script as a module: what it does only when it is run (``__name__ == "__main__"``) is not done."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
