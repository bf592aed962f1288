"""Stands for ``docker`` and ``podman``: builds and runs what Harbor asks them to, in bubblewrap instead of containers.

Run as ``python fake_docker.py docker compose ...``. ``FAKE_DOCKER`` is a folder: a subfolder for each running project,
and ``log``, a line for each command. What a real engine promises (images, networks, limits) is not here; how Harbor and
our adapter use one is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ.get("FAKE_DOCKER", "/nonexistent"))
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc/alternatives")


def main(engine: str, arguments: list[str]) -> int:
    with (HOME / "log").open("a", encoding="utf-8") as log:
        log.write(json.dumps([engine, *arguments]) + "\n")
    if arguments[:1] == ["info"]:
        print("linux" if "{{.OSType}}" in arguments else "")
        return 0
    if arguments[:1] == ["inspect"]:
        print("linux")
        return 0
    if "--help" in arguments:  # what podman's dialect is found out by
        print("Usage: compose [--detach]")
        return 0
    if arguments[:1] != ["compose"] or arguments[1:2] == ["ls"]:
        return 0 if arguments[:1] == ["compose"] else 1
    return compose(arguments[1:])


def compose(arguments: list[str]) -> int:
    options: dict[str, list[str]] = {}
    while arguments[0] in ("--project-name", "--project-directory", "-f"):
        options.setdefault(arguments[0], []).append(arguments[1])
        arguments = arguments[2:]
    project = HOME / options["--project-name"][0]
    command, *rest = arguments
    if command == "up":
        return up(project, options["-f"])
    if command == "down":
        shutil.rmtree(project, ignore_errors=True)
        return 0
    if command in ("exec", "cp") and not project.is_dir():
        print("no container of this project runs")
        return 1
    if command == "exec":
        return execute(project, rest)
    if command == "cp":
        return copy(project, *rest)
    return 0


def up(project: Path, files: list[str]) -> int:
    root, context = project / "root", Path(os.environ["CONTEXT_DIR"])
    folder = "/"
    root.mkdir(parents=True)
    for line in (context / "Dockerfile").read_text().splitlines():
        word, *parts = line.split()
        if word == "WORKDIR":
            folder = parts[0]
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            place = root / folder.lstrip("/") / parts[1]
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(context / parts[0], place)
        elif word == "RUN":
            (root / "ran").write_text(" ".join(parts))
    mounts = []
    for file in files:
        if file.endswith(".json"):
            for mount in json.loads(Path(file).read_text()).get("services", {}).get("main", {}).get("volumes", []):
                mounts.append([mount["source"], mount["target"]])
    (project / "setup.json").write_text(json.dumps({"folder": folder, "mounts": mounts}))
    return 0


def execute(project: Path, arguments: list[str]) -> int:
    setup = json.loads((project / "setup.json").read_text())
    folder, variables = setup["folder"], {"PATH": "/usr/bin:/bin", "HOME": "/root"}
    while arguments[0].startswith("-"):
        if arguments[0] == "-T":
            arguments = arguments[1:]
            continue
        if arguments[0] == "-w":
            folder = arguments[1]
        elif arguments[0] == "-e":
            name, _, value = arguments[1].partition("=")
            variables[name] = value
        arguments = arguments[2:]
    command = ["bwrap", "--unshare-pid", "--die-with-parent", "--bind", str(project / "root"), "/"]
    for path in SYSTEM:
        if os.path.exists(path):
            command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--clearenv", "--chdir", folder]
    for source, target in setup["mounts"]:
        command += ["--bind", source, target]
    for name, value in variables.items():
        command += ["--setenv", name, value]
    return subprocess.run([*command, *arguments[1:]]).returncode


def copy(project: Path, source: str, target: str) -> int:
    inside = project / "root"
    one, other = (
        inside / place.removeprefix("main:").lstrip("/") if place.startswith("main:") else Path(place)
        for place in (source, target)
    )
    if source.endswith("/."):
        shutil.copytree(one, other, dirs_exist_ok=True)
    else:
        other.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(one, other)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
