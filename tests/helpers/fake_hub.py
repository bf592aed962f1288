"""A Hub of this process: what would be uploaded is read, as the real client reads it, when its thread gets to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub.utils import filter_repo_objects


@dataclass
class Upload:
    """One commit."""

    message: str
    into: str | None
    files: dict[str, bytes]
    token: object
    revision: object


@dataclass
class FakeHub:
    """Stands for ``HfApi``. A background upload reads its files ``delay`` seconds after ``gate`` is set; the first
    ``fails`` uploads fail."""

    delay: float = 0.0
    fails: int = 0
    created: list[dict[str, Any]] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))

    def __post_init__(self) -> None:
        self.gate.set()

    def create_repo(self, name: str, **options: Any) -> SimpleNamespace:
        self.created.append({"name": name, **options})
        return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

    def upload_folder(
        self, *, repo_id: str, folder_path: str, commit_message: str, token: object = None,
        run_as_future: bool = False, ignore_patterns: Sequence[str] | None = None, revision: object = None,
        path_in_repo: str | None = None,
    ) -> Upload | Future[Upload]:  # fmt: skip
        def upload() -> Upload:
            if run_as_future:
                assert self.gate.wait(60)
                time.sleep(self.delay)
            if self.fails:
                self.fails -= 1
                raise ConnectionError("the Hub is away")
            folder = Path(folder_path)
            names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
            kept = list(filter_repo_objects(names, ignore_patterns=ignore_patterns))
            files = {name: (folder / name).read_bytes() for name in kept}
            found = Upload(commit_message, path_in_repo, files, token, revision)
            self.uploads.append(found)
            return found

        return self.threads.submit(upload) if run_as_future else upload()
