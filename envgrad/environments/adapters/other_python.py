"""An environment that runs in another Python: another version, or packages whose pins do not fit beside ours."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from envgrad.environments.remote.client import Remote
from envgrad.environments.remote.host import Host
from envgrad.environments.remote.stand_in import first_remote
from envgrad.errors import ConfigurationError


class OtherPython:
    """A factory of environments that live under another interpreter, one process for each instance.

    There the environment is the same class with the same contract; here its members ask that process. A tool that runs
    past ``tool_timeout`` is interrupted there, and its process killed if it does not obey. Global random generators
    are the process's own, and begin anew with each reset from the group's seed. What goes to and fro is JSON: a
    dataset's columns, tool arguments, openings. ``group_reward`` and ``run_agent`` do not cross processes.

    Args:
        python: the interpreter, for example ``".venv-games/bin/python"``. It needs the environment's packages, and
            ``transformers`` if tools are methods; torch is not needed, and envgrad itself is lent from here.
        target: ``"package.module:name"``, a factory; with ``arguments``, what it is called with.
        arguments: keyword arguments for the name, JSON.
        path: folders where it finds ``package``, in front of its own.
        variables: environment variables for it beside this process's.

    Raises:
        ConfigurationError: the interpreter, the target or the arguments do not work.
        EnvironmentContractError: the environment breaks the contract, or needs its siblings or the sampler beside it.

    Example:
        >>> import sys
        >>> factory = OtherPython(sys.executable, "envgrad.starter.compass:Compass")
        >>> from envgrad.environments.contract import inspect_environment
        >>> spec, instance = inspect_environment("compass", factory)
        >>> spec.uses_task_identity, [tool.name for tool in instance.tools]
        (True, ['move'])
        >>> instance.close()
        >>> factory.close()
    """

    def __init__(
        self,
        python: str | os.PathLike[str],
        target: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        path: Sequence[str | os.PathLike[str]] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        module, colon, name = target.partition(":")
        if not (module and colon and name):
            raise ConfigurationError(f"target={target!r} must be 'package.module:name', the place of a factory")
        self.python, self.target = os.fspath(python), target
        self.arguments, self.variables = dict(arguments or {}), dict(variables or {})
        self.path = [os.path.abspath(os.fspath(folder)) for folder in path]
        self._host: Host | None = None
        self._class: type[Remote] | None = None

    def __call__(self) -> Remote:
        if self._class is None:
            self._host = Host(self.python, self.target, self.arguments, path=self.path, variables=self.variables)
            first = first_remote(self._host, self.target.rpartition(":")[2])
            self._class = type(first)
            return first
        return self._class()

    def close(self) -> None:
        """End the server process, and with it every instance; the next call starts anew."""
        if self._host is not None:
            self._host.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_host": None, "_class": None}

    def __repr__(self) -> str:
        return f"OtherPython({self.python!r}, {self.target!r})"
