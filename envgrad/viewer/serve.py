"""Address, port, and the server itself. starlette and uvicorn come with the extra ``envgrad[viewer]``."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from envgrad.errors import ConfigurationError, first_line
from envgrad.viewer.app import build_app
from envgrad.viewer.source import RunPlace, RunSource

DEFAULT_PORT = 8421
"""taken if it is free, so that addresses stay the same from one start to the next"""
TOKEN_VARIABLE = "ENVGRAD_VIEW_TOKEN"
"""a secret of one's own, so that links outlive the server"""
_LEAST_TOKEN = 16
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def check_installed() -> None:
    """
    Raises:
        ConfigurationError: names what is missing, and the extra.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"the viewer needs {' and '.join(missing)}: pip install 'envgrad[viewer]'")


def run_places(folders: Sequence[Path]) -> list[RunPlace]:
    """The runs with ids and names that tell them apart.

    Example:
        >>> [place.name for place in run_places([Path("a/first"), Path("b/first")])]
        ['a/first', 'b/first']

    Raises:
        ConfigurationError: the same run twice, or more than two.
    """
    if len(folders) > 2:
        raise ConfigurationError(f"{len(folders)} runs were given; the viewer compares two at most")
    whole = [folder.expanduser().absolute() for folder in folders]
    whole = [folder.parent if folder.name == "episodes" else folder for folder in whole]
    if len(set(whole)) < len(whole):
        raise ConfigurationError(f"{folders[0]} was given twice; compare it with another run")
    names = [folder.name for folder in whole]
    if len(set(names)) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder in whole]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in whole]
    return [
        RunPlace(id=identifier, name=name, folder=folder)
        for identifier, name, folder in zip("ab"[: len(whole)], names, whole, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewAddress:
    """Where the viewer listens, and who may open it."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None: ``DEFAULT_PORT``, or a free one where that is taken"""
    token: str = ""
    """the secret in the address; empty: ``ENVGRAD_VIEW_TOKEN``, or a new one"""

    def secret(self) -> str:
        """The secret to use.

        Raises:
            ConfigurationError: one that is short, or that an address cannot hold.
        """
        token = self.token or os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            return secrets.token_urlsafe(_LEAST_TOKEN)
        if len(token) < _LEAST_TOKEN or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
            raise ConfigurationError(
                f"{TOKEN_VARIABLE} must be at least {_LEAST_TOKEN} letters, digits, '-' and '_'; "
                "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
            )
        return token

    def listen(self) -> socket.socket:
        """A socket that listens there.

        Raises:
            ConfigurationError: the address cannot be had.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        if self.port is None:
            try:
                return socket.create_server((self.host, DEFAULT_PORT), family=family)
            except OSError:  # somebody has it: any free one
                pass
        try:
            return socket.create_server((self.host, self.port or 0), family=family)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {self.host}, port {self.port or 'any'}: {first_line(error)}; "
                "give another --host or --port"
            ) from error

    @property
    def everywhere(self) -> bool:
        """Whether it listens on all of the machine's addresses."""
        return self.host in ("0.0.0.0", "::")

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def names(self) -> frozenset[str]:
        """Host names under which it may be opened."""
        own = {self.host.lower()}
        if self.everywhere:
            own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        return _LOOPBACK | own


def serve(folders: Sequence[Path], address: ViewAddress, ready: Callable[[str], None]) -> None:
    """Serve until interrupted (Ctrl-C or SIGTERM).

    Args:
        folders: One run, or two to compare.
        address: Where.
        ready: Called with the address to open, once the server listens.

    Raises:
        ConfigurationError: an extra is missing, a folder holds no episode log, or the address cannot be had.
    """
    check_installed()
    import uvicorn

    places = run_places(folders)
    secret = address.secret()
    with ExitStack() as stack:
        sources = []
        for place in places:
            source = RunSource(place)
            stack.callback(source.close)
            sources.append(source)
        listener = stack.enter_context(address.listen())
        app = build_app(sources, token=secret, hosts=address.names(), any_address=address.everywhere)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        shown = "127.0.0.1" if address.everywhere else address.host
        shown = f"[{shown}]" if ":" in shown else shown
        threading.Thread(target=sources[0].warm, name="envgrad-viewer-warm", daemon=True).start()
        ready(f"http://{shown}:{listener.getsockname()[1]}/{secret}/")
        with suppress(KeyboardInterrupt):  # the usual end, once the server has closed its connections
            uvicorn.Server(config).run(sockets=[listener])
