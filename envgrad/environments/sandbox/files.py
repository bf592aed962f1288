"""Files of a workspace, written and read from outside of it: no link that a program left there leads us anywhere."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path, PurePosixPath

from envgrad.errors import EnvironmentFailure

PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"
MOST_LINKS = 40
HOSTS = "127.0.0.1 localhost sandbox\n"


def inside(workspace: Path, path: str, *, whole: bool) -> Path:
    """Where ``path``, seen from the workspace, lies on this machine.

    Args:
        whole: links are read as a program in there reads them, whose root the workspace is. Else none may lead out.

    Raises:
        EnvironmentFailure: outside of the workspace, also by a link that a program left there; links in a circle.
    """
    if whole:
        return _chrooted(workspace, path)
    target = Path(os.path.realpath(workspace / path.lstrip("/")))
    if not target.is_relative_to(os.path.realpath(workspace)):
        raise EnvironmentFailure(f"{path!r} is outside of the workspace")
    return target


def _chrooted(root: Path, path: str) -> Path:
    place, waiting, links = root, list(reversed(PurePosixPath(path).parts)), 0
    while waiting:
        part = waiting.pop()
        if part == "/":
            place = root
        elif part == "..":
            place = root if place == root else place.parent
        elif (place / part).is_symlink():
            links += 1
            if links > MOST_LINKS:
                raise EnvironmentFailure(f"{path!r} leads through too many links")
            waiting += reversed(PurePosixPath(os.readlink(place / part)).parts)
        else:
            place = place / part
    return place


def give(path: Path, user: int | None) -> None:
    """Make ``path`` a user's own; None leaves it."""
    if user is not None:
        os.chown(path, user, user, follow_symlinks=False)


def give_parents(path: Path, workspace: Path, user: int | None) -> None:
    """Make ``path`` and the folders above it, below the workspace, a user's own."""
    while path != workspace and path != path.parent:
        give(path, user)
        path = path.parent


def replace_file(target: Path, content: bytes, *, executable: bool = False) -> None:
    """Write a plain file, whatever was there before: a pipe would block, and a file may have lost its rights."""
    clear(target)
    target.write_bytes(content)
    target.chmod(0o755 if executable else 0o644)


def clear(path: Path) -> None:
    """Remove what is at ``path``, itself, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def copy_in(source: Path, target: Path, user: int | None) -> None:
    """Copy a file or the content of a folder of ours; links are followed here, and what is in the way goes."""
    if not source.is_dir():
        replace_file(target, source.read_bytes(), executable=os.access(source, os.X_OK))
        give(target, user)
        return
    if target.is_symlink() or not target.is_dir():
        clear(target)
        target.mkdir()
    give(target, user)
    target.chmod(0o755)
    for entry in sorted(source.iterdir()):
        copy_in(entry, target / entry.name, user)


def copy_out(source: Path, target: Path) -> None:
    """Copy a file, or the content of a folder, of a workspace; links, pipes and the like stay behind."""
    kind = os.lstat(source).st_mode
    if stat.S_ISREG(kind):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target, follow_symlinks=False)
    elif stat.S_ISDIR(kind):
        target.mkdir(parents=True, exist_ok=True)
        for entry in sorted(source.iterdir()):
            copy_out(entry, target / entry.name)


def special_files(folder: str, names: list[str]) -> list[str]:
    """Pipes, sockets and devices, which cannot be copied."""
    kinds = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [
        name for name, kind in kinds.items() if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind))
    ]


def remove_tree(root: Path) -> None:
    """Remove ``root``, where a program may have taken its own rights to a folder away. Nothing outside of ``root`` is
    touched: links are not followed, and no rights above it are changed."""
    if not root.exists():
        return
    os.chmod(root, 0o700)
    for folder, folders, _ in os.walk(root):
        for name in folders:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(root, ignore_errors=True)


def prepare_root(root: Path, shown: tuple[str, ...], user: int | None) -> None:
    """Make a workspace that is a whole file system ready for a run: where parts of this machine are shown there must
    be a plain place for them, whatever the last program put there instead. No program runs meanwhile.

    Args:
        shown: absolute paths, of this machine or of its own, that are mounted over the workspace.
        user: whose it is.
    """
    for path in (*shown, "/proc", "/dev", "/tmp", "/root", "/etc"):
        place = root
        for part in Path(path).parts[1:-1]:
            place = place / part
            _be_folder(place, user)
        place = place / Path(path).name
        if os.path.islink(path):
            if not place.is_symlink() or os.readlink(place) != os.readlink(path):
                clear(place)
                place.symlink_to(os.readlink(path))
        elif os.path.isdir(path) or not os.path.exists(path):
            _be_folder(place, user)
        elif place.is_symlink() or not place.is_file():
            clear(place)
            place.touch()
    for name, text in (("passwd", PASSWD), ("group", GROUP), ("hosts", HOSTS)):
        if not os.path.lexists(root / "etc" / name):
            (root / "etc" / name).write_text(text)


def _be_folder(path: Path, user: int | None) -> None:
    if path.is_symlink() or not path.is_dir():
        clear(path)
        path.mkdir()
        give(path, user)
