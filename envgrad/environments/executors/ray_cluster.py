"""The connection to a Ray cluster: the user's own, one that is running, or a local one that is started here.

Ray is imported by the first factory that needs it. What its import and its start change in this process (the handler
of SIGTERM) is put back.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from envgrad.environments.adapters.extras import require
from envgrad.environments.closing import call_all_now
from envgrad.errors import ConfigurationError, first_line

STORE_BYTES = 128 * 2**20
"""of a local cluster's object store: what environments say goes past it"""
EXIT_SECONDS = 15.0
LOOPBACK = "127.0.0.1"

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""for the cluster that is started here: it tells nobody of itself, and leaves the variables of GPUs alone"""


class Member(Protocol):
    """Who holds something on the cluster."""

    def end(self) -> None:
        """Close it, before Ray is gone."""
        ...


_lock = threading.RLock()
_members: weakref.WeakSet[Any] = weakref.WeakSet()
_ours = False
"""this module has connected"""


def join(member: Member, address: str | None) -> Any:
    """The package ``ray``, connected; ``member`` must ``leave``.

    Raises:
        ConfigurationError: the package is not there; no cluster answers at ``address``, or Ray is connected to another.
    """
    global _ours
    with _lock, _sigterm_kept():
        ray: Any = require("ray", extra="ray", what="environment_executor='ray'")
        if not ray.is_initialized():
            _connect(ray, address or os.environ.get("RAY_ADDRESS"))
            _ours = True
            _members.clear()
        elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
            raise ConfigurationError(
                f"ray_address={address!r} cannot act: this process is connected to "
                f"{ray.get_runtime_context().gcs_address}; drop it, or call ray.shutdown() first"
            )
        _members.add(member)
        # Exit hooks run in the opposite order: this one before Ray's own.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        return ray


def leave(member: Member, ray: Any) -> None:
    """The last one disconnects from a cluster that was joined here, which stops one that was started here."""
    global _ours
    with _lock:
        _members.discard(member)
        if not _members and _ours:
            _ours = False
            with _sigterm_kept():
                ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    quiet: Mapping[str, Any] = {"logging_level": logging.WARNING, "configure_logging": False}
    if address is None or address == "local":
        with _variables(QUIET):
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                _node_ip_address=LOOPBACK,  # no other machine is to join it
                **quiet,
            )
        return
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigurationError(f"ray_address={address!r}: no cluster answers there: {first_line(error)}") from error


def _end_all() -> None:
    call_all_now([member.end for member in list(_members)], timeout=EXIT_SECONDS)


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def told(ray: Any) -> str:
    """What the cluster has, for messages."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    shown = "; ".join(f"{node['NodeManagerAddress']}: {_amounts(node['Resources'])}" for node in nodes[:8])
    more = f"; and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return f"{len(nodes)} nodes are alive ({shown}{more}), of which is free: {_amounts(ray.available_resources())}"


def _amounts(resources: Mapping[str, float]) -> str:
    shown = {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "object_store_memory"))
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in shown.items()) or "nothing"
