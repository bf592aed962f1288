"""The C++ kernels of this folder, compiled for the machine's own processor when they are first used, and kept.

What small models spend on a CPU is mostly the cost of calling operations one after the other; a few kernels of our own
do the same work in one call. They need a C++ compiler (``c++``, ``g++``, ``clang++`` or what ``CXX`` names) and nothing
else. Where there is none, torch's operations do the work, more slowly, with the same results up to rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

OFF = "ENVGRAD_NATIVE"
"""environment variable; ``0`` leaves the kernels out"""
_SOURCES = Path(__file__).parent / "kernels"
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=fast", "-w",
)  # fmt: skip
_SECONDS = 120.0
"""that compiling may take; it takes about three"""


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled if they have not been on this machine; None where that cannot be done.

    Example:
        >>> found = library()
        >>> found is None or found.envgrad_kernels_version()
        1
    """
    if os.environ.get(OFF) == "0" or sys.byteorder != "little":
        return None
    compiler = _compiler()
    if compiler is None:
        logger.info("no C++ compiler here (c++, g++, clang++, CXX): sampling on a CPU uses torch's operations only")
        return None
    try:
        found = _loaded(compiler)
        found.envgrad_kernels_version.restype = ctypes.c_int
        return found
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "the kernels could not be compiled with %s and loaded, so torch's operations do their work, more slowly; "
            "%s=0 silences this: %s", compiler, OFF, str(detail).strip()[-2000:],
        )  # fmt: skip
        return None


def _compiler() -> str | None:
    """Its command, which may have several words (``ccache g++``)."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        first, *others = shlex.split(name) or [""]
        found = shutil.which(first)
        if found is not None:
            return shlex.join([found, *others])
    return None


def _loaded(compiler: str) -> ctypes.CDLL:
    """From the first folder that it can be written to and loaded from.

    Raises:
        OSError: there is none.
        subprocess.SubprocessError: the compiler fails, or takes too long.
    """
    error = OSError("no folder for the compiled kernels can be written to")
    for folder in _folders():
        try:
            return ctypes.CDLL(str(_compiled(compiler, folder)))
        except OSError as found:  # a file system that nothing may be executed from, or a full one
            error = found
    raise error


def _compiled(compiler: str, folder: Path) -> Path:
    """The shared library of these sources, this compiler and this processor.

    Raises:
        OSError: it cannot be written.
        subprocess.SubprocessError: the compiler fails, or takes too long.
    """
    sources = sorted(_SOURCES.glob("*.cpp"))
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    key = hashlib.sha256()
    for part in (compiler, _version_of(compiler), processor, _processor(), *_FLAGS):
        key.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            key.update(source.read_bytes() + b"\0")
    path = folder / f"kernels-{key.hexdigest()[:20]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # others may compile at the same moment
        made = Path(temporary) / path.name
        _run(*shlex.split(compiler), *_FLAGS, processor, *map(str, sources), "-o", str(made))
        made.replace(path)
    return path


def _version_of(compiler: str) -> str:
    return _run(*shlex.split(compiler), "--version")


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    return done.stdout


def _processor() -> str:
    """What tells this machine's processor from another's that shares its home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _folders() -> Iterator[Path]:
    """Folders of this user's own that can be written to: in the user's cache, and among the temporary files."""
    # expanduser, as Path.home() raises for a user without a home, such as a container's
    cached = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = [Path(cached) / "envgrad"] if os.path.isabs(cached) else []
    for folder in (*own, Path(tempfile.gettempdir()) / f"envgrad-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            yield folder
