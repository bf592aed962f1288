"""The command line that puts a program into its sandbox: ``prlimit``, ``setpriv`` (as root) and ``bwrap``.

prlimit  processes, memory and processor time of each process, size of each file, no core dumps
setpriv  as root only: a user of the sandbox's own, since limits on processes do not hold for root
bwrap    new namespaces (user, pid, network, ipc, host name, cgroup), a read-only system, a private /tmp and
         /dev, the workspace; no capabilities; no environment; dies with its parent
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envgrad.environments.sandbox.limits import SandboxLimits
from envgrad.errors import ConfigurationError

WORKSPACE = "/workspace"
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc/alternatives", "/etc/ld.so.cache")
"""what is shown of this machine, read-only"""

VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORKSPACE, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
WHOLE_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TAR_OPTIONS": "--no-same-owner",  # there is one user
}
PROBE_USER = 1_879_048_191
"""the user that the first try runs as where this process is root"""


class SandboxUnavailable(ConfigurationError):
    """There is no sandbox here; nothing is ever run without one instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSetup:
    """What does not change between the runs of a sandbox."""

    workspace: str
    limits: SandboxLimits
    user: int | None
    """the user that it runs as where this process is root; None: this process's own"""
    read_only: Mapping[str, str] = field(default_factory=dict)
    """path inside -> path here, shown read-only"""
    variables: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    """the workspace is the whole file system, and the program looks like root in it"""


def sandboxed(setup: SandboxSetup, program: Sequence[str], *, seccomp_fd: int | None) -> list[str]:
    """The command that runs ``program`` in the sandbox."""
    limits = setup.limits
    memory, disk = limits.memory_mb * 2**20, limits.disk_mb * 2**20
    command = [
        "prlimit", f"--nproc={limits.processes}", f"--as={memory}", f"--cpu={limits.cpu_seconds}", f"--fsize={disk}",
        "--core=0", "--nofile=256", "--memlock=0", "--msgqueue=0", "--sigpending=256",
    ]  # fmt: skip
    if setup.user is not None:
        user = str(setup.user)
        command += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"]
    command += [
        "bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv",
    ]  # fmt: skip
    if setup.whole:
        command += ["--uid", "0", "--gid", "0", "--bind", setup.workspace, "/"]
    for path in SYSTEM:
        command += _shown(path, links=not setup.whole)
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(2**20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    if not setup.whole:
        command += ["--size", str(disk), "--tmpfs", "/tmp", "--bind", setup.workspace, WORKSPACE]
    for inside, outside in setup.read_only.items():
        command += ["--ro-bind", outside, inside]
    command += ["--chdir", "/" if setup.whole else WORKSPACE]
    for name, value in ((WHOLE_VARIABLES if setup.whole else VARIABLES) | dict(setup.variables)).items():
        command += ["--setenv", name, value]
    if seccomp_fd is not None:
        command += ["--seccomp", str(seccomp_fd)]
    return [*command, "--", *program]


def _shown(path: str, *, links: bool) -> list[str]:
    """A part of this machine's system as it is: a link stays a link, if ``links`` (else it is there already)."""
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path] if links else []
    return ["--ro-bind", path, path] if os.path.exists(path) else []


@functools.cache
def unavailable() -> str | None:
    """Why there is no sandbox on this machine; None if there is one. Tried once for real.

    Example:
        >>> unavailable() is None or isinstance(unavailable(), str)
        True
    """
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, and this is {sys.platform}"
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed; install the package {package} (apt-get install {package})"
    with tempfile.TemporaryDirectory(prefix="envgrad-sandbox-") as folder:
        os.chmod(folder, 0o755)
        user = PROBE_USER if os.geteuid() == 0 else None
        setup = SandboxSetup(workspace=folder, limits=SandboxLimits(), user=user)
        try:
            done = subprocess.run(
                sandboxed(setup, ["true"], seccomp_fd=None), capture_output=True, text=True, timeout=30, cwd="/"
            )
        except subprocess.TimeoutExpired:
            return "bwrap did not end within 30 s"
    return None if done.returncode == 0 else _refusal(done.stderr.strip() or f"exit code {done.returncode}")


def _refusal(words: str) -> str:
    """Who keeps bubblewrap from making its namespaces, as far as it can be told, and what to do about it."""
    if not any(
        mark in words for mark in ("uid map", "namespace", "not permitted", "ermission denied", "No space left")
    ):
        return f"bwrap fails: {words}"
    refused = f"this machine does not let it make user namespaces ({words})"
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            f"{refused}: AppArmor forbids them to programs without a profile; give bwrap one (a file "
            "/etc/apparmor.d/bwrap with 'profile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }', then "
            "apparmor_parser -r on it), or sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return f"{refused}: the kernel's setting forbids them; sysctl kernel.unprivileged_userns_clone=1"
    if _setting("user/max_user_namespaces") == "0":
        return f"{refused}: the kernel's setting allows none; sysctl user.max_user_namespaces=10000"
    return (
        f"{refused}: in a container, its seccomp or AppArmor profile forbids them (docker run --security-opt "
        "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined, or a profile "
        "that lets unshare, mount and pivot_root through)"
    )


def _setting(name: str) -> str | None:
    path = Path("/proc/sys", name)
    return path.read_text().strip() if path.exists() else None


def require_sandbox() -> None:
    """Refuse to go on where there is no sandbox.

    Raises:
        SandboxUnavailable: with the reason and the fix.
    """
    reason = unavailable()
    if reason is not None:
        raise SandboxUnavailable(f"no sandbox here, and nothing is run without one: {reason}")
