"""What the bubblewrap backend makes of a Harbor task's ``environment`` folder: folders, copies and variables.

It builds no image. A Dockerfile whose steps are ``WORKDIR``, ``COPY`` and ``ENV`` says what belongs where, and that is
done in the sandbox's own file system; programs are those of this machine. What would need a build is refused by name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from envgrad.errors import ConfigurationError

BASE_IMAGES = ("scratch", "debian", "ubuntu", "python", "buildpack-deps")
"""images that hold nothing but programs, in whose place this machine's stand"""
IDLE = ("LABEL", "EXPOSE", "CMD", "MAINTAINER", "STOPSIGNAL", "VOLUME", "SHELL")
"""steps that change nothing before the first command"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A file to a file's place, or the content of a folder into a folder."""

    source: Path
    target: str


@dataclass(slots=True, kw_only=True)
class Build:
    """What to do in an empty file system.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "data.csv").write_text("1,2")
        >>> _ = (folder / "Dockerfile").write_text("FROM debian\\nWORKDIR /app\\nCOPY data.csv .\\nENV N=3\\n")
        >>> build = read_build(folder)
        >>> build.workdir, build.folders, [copy.target for copy in build.copies], build.variables
        ('/app', ['/app'], ['/app/data.csv'], {'N': '3'})
    """

    workdir: str = "/"
    folders: list[str] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def read_build(environment: Path, *, images: Sequence[str] = BASE_IMAGES, image: str | None = None) -> Build:
    """What the folder's Dockerfile asks for.

    Args:
        environment: the task's ``environment`` folder, which is the build's context.
        images: what ``FROM`` may name, without tag.
        image: the task's ``docker_image``.

    Raises:
        ConfigurationError: it asks for something that needs a build or an image.
    """
    if image is not None:
        _check_image(image, images, "docker_image")
    if (environment / "docker-compose.yaml").exists():
        raise _refused("docker-compose.yaml", "it starts no services")
    build, dockerfile = Build(), environment / "Dockerfile"
    if not dockerfile.exists():
        if image is None:
            raise ConfigurationError(f"{environment} has no Dockerfile, and the task names no docker_image")
        return build
    stages, arguments = 0, dict[str, str]()
    for name, rest in _steps(dockerfile.read_text(encoding="utf-8")):
        if name == "ARG":
            variable, _, value = rest.partition("=")
            arguments[variable.strip()] = value.strip().strip("\"'")
            continue
        rest = _substituted(rest, arguments | build.variables)
        if name == "FROM":
            stages += 1
            if stages > 1:
                raise _refused(f"FROM {rest}", "it knows one stage")
            _check_image(rest.split()[0], images, "FROM")
        elif name == "WORKDIR":
            build.workdir = _absolute(rest.strip("\"'"), build.workdir)
            build.folders.append(build.workdir)
        elif name in ("COPY", "ADD"):
            build.copies += _copies(name, rest, environment, build.workdir)
        elif name == "ENV":
            build.variables |= _variables(rest)
        elif not (name in IDLE or (name == "USER" and rest in ("root", "0"))):
            raise _refused(f"{name} {rest}", "it builds nothing, starts nothing, and has one user")
    return build


def _refused(step: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the bubblewrap backend refuses {step!r:.200}: {why}; it takes FROM, WORKDIR, COPY and ENV, with this "
        "machine's own programs. Bring files with COPY, or use backend='docker' or 'podman'"
    )


def _check_image(image: str, images: Sequence[str], where: str) -> None:
    plain = image.partition("@")[0]
    head, slash, last = plain.rpartition("/")
    plain = (head + slash + last.partition(":")[0]).removeprefix("docker.io/").removeprefix("library/")
    if plain not in images:
        raise _refused(
            f"{where} {image}",
            f"it has no images, and only those of {list(images)} are known to hold nothing that this machine lacks "
            "(more by backend_options={'images': [...]})",
        )


def _steps(text: str) -> list[tuple[str, str]]:
    """``(instruction, rest)`` of each step: comments left out, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    steps = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(step[0].upper(), step[1].strip() if len(step) > 1 else "") for step in steps]


def _substituted(text: str, known: Mapping[str, str]) -> str:
    """``$NAME``, ``${NAME}`` and ``${NAME:-else}`` by what is known; the rest stays."""

    def value(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        return known.get(name) or (match["other"] if match["other"] is not None else match[0])

    return re.sub(r"\$(?:(?P<plain>\w+)|\{(?P<braced>\w+)(?::-(?P<other>[^}]*))?\})", value, text)


def _absolute(path: str, workdir: str) -> str:
    parts: list[str] = []
    for part in PurePosixPath(workdir, path).parts[1:]:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/" + "/".join(parts)


def _variables(rest: str) -> dict[str, str]:
    first = rest.split(None, 1)
    if first and "=" not in first[0]:
        return {first[0]: first[1] if len(first) > 1 else ""}
    return {name: value for name, _, value in (word.partition("=") for word in shlex.split(rest))}


def _copies(name: str, rest: str, context: Path, workdir: str) -> list[Copy]:
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        if not flag.startswith("--chown="):  # there is one user
            raise _refused(f"{name} {flag}", "it knows no such option")
        rest = rest.strip()
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if len(words) < 2 or any(word.startswith("<<") for word in words):
        raise _refused(f"{name} {rest}", "it copies files of the context to one place")
    *patterns, target = words
    copies = []
    into = target.endswith("/") or target in (".", "..") or len(patterns) > 1
    for pattern in patterns:
        if name == "ADD" and re.search(r"://|^git@|\.(tar|tgz|tbz2?|txz)(\.|$)", pattern):
            raise _refused(f"ADD {pattern}", "it fetches and unpacks nothing")
        plain = pattern.lstrip("/") or "."
        found = sorted(context.glob(plain)) if any(mark in plain for mark in "*?[") else [context / plain]
        if not found or not all(path.exists() for path in found):
            raise ConfigurationError(f"{context / 'Dockerfile'}: {name} {pattern}: there is no such file beside it")
        for path in found:
            if not path.resolve().is_relative_to(context.resolve()):
                raise _refused(f"{name} {pattern}", "it leads out of the context")
            inner = path.name if path.is_file() and (into or len(found) > 1) else ""
            copies.append(Copy(source=path, target=_absolute(str(PurePosixPath(target, inner)), workdir)))
    return copies
