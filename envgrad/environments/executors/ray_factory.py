"""Instances on a Ray cluster: a factory of environments, made from an ordinary one."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

from envgrad.environments.boundary import Raised, guard
from envgrad.environments.executors.hosts import importable, pickled_by_name
from envgrad.environments.executors.ray_fleet import Fleet, Post
from envgrad.environments.executors.ray_options import RayOptions
from envgrad.environments.executors.ray_remote import OnRay, first_on_ray
from envgrad.errors import ConfigurationError


class RayFactory:
    """A factory whose instances live on a Ray cluster, each in a process of its own that an actor holds.

    What can be imported is imported by the nodes, which need it installed, or on a shared path. Everything else goes
    there by value, as it is when the first instance is made: classes of a script or notebook, closures, lambdas. Not
    thread-safe in that first call.

    Args:
        factory: a callable without arguments, as ``environment_factory``.
        name: what messages call it.
        options: the cluster, and what is asked of it.
        close_seconds: what an environment's ``close()`` may take; then its process is ended. None: no limit.

    Raises:
        ConfigurationError: this system has no fork. When called: see ``ray_cluster.join``; what cannot be pickled.
    """

    def __init__(
        self,
        factory: Callable[[], object],
        name: str,
        options: RayOptions | None = None,
        *,
        close_seconds: float | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise ConfigurationError(
                f"environment_executor='ray' needs Linux on every node, whose processes can be forked; this is "
                f"{sys.platform}: use 'thread'"
            )
        self.name = name
        self._factory = factory
        self._close_seconds = close_seconds
        self._fleet = Fleet(name, lambda: pickled(factory, name), options or RayOptions())
        self._class: type[OnRay] | None = None

    def __call__(self) -> OnRay:
        if self._class is None:
            first = first_on_ray(self._fleet, self.name, self._close_seconds)
            self._class = type(first)
            return first
        return self._class()

    @property
    def actors(self) -> tuple[Post, ...]:
        """The actors that live."""
        return self._fleet.posts

    @property
    def pid(self) -> int | None:
        """None: no process here serves instances."""
        return None

    def close(self) -> None:
        """End the actors, and with them every instance; the next call starts anew."""
        self._fleet.close()


def pickled(factory: Callable[[], object], name: str) -> bytes:
    """``factory`` for the nodes: by name where they can import it, else by value, with all that they could not import.

    Raises:
        ConfigurationError: something in it cannot be pickled.
    """
    found = pickled_by_name(factory)
    if found is not None:
        return found
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    known: set[str] = set()
    with contextlib.ExitStack() as undo:
        while True:
            file = io.BytesIO()
            pickler = _pickler(cloudpickle, file)
            made = guard(pickler.dump, factory)
            if isinstance(made, Raised):
                raise ConfigurationError(
                    f"{name} cannot go to a Ray cluster: {type(made.error).__name__}: {made.error}; put it into a "
                    "module that the nodes can import, or use environment_executor='process'"
                ) from made.error
            foreign = {one for one in pickler.modules if one in sys.modules and not importable(one)}
            foreign -= known | {"__main__"}  # which goes by value anyway
            if not foreign:
                return file.getvalue()
            known |= foreign
            for module in foreign:
                cloudpickle.register_pickle_by_value(sys.modules[module])
                undo.callback(cloudpickle.unregister_pickle_by_value, sys.modules[module])


def _pickler(cloudpickle: Any, file: io.BytesIO) -> Any:
    """A pickler that collects the modules of classes and functions."""
    base: Any = cloudpickle.CloudPickler

    class Names(base):
        modules: ClassVar[set[str]] = set()

        def persistent_id(self, value: object) -> None:
            if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
                self.modules.add(str(value.__module__ or "builtins"))

        def reducer_override(self, value: object) -> Any:
            reduced = super().reducer_override(value)
            if isinstance(value, types.FunctionType) and isinstance(reduced, tuple) and len(reduced) > 2:
                _add_annotated(value, reduced[2])
            return reduced

    return Names(file)


def _add_annotated(function: types.FunctionType, state: Any) -> None:
    """A function that goes by value takes the names of its code along; annotations that are texts have names too."""
    texts = [text for text in function.__annotations__.values() if isinstance(text, str)]
    names = {name for text in texts for name in re.findall(r"[^\W\d]\w*", text)}
    known = state[1]["__globals__"]
    known.update({name: function.__globals__[name] for name in names - set(known) if name in function.__globals__})
