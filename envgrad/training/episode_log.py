"""Every episode of a run, as one JSON object per line under ``output_dir/episodes``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envgrad.rollout.runner import Round
from envgrad.types import Episode

EPISODES_PER_FILE = 10_000


class EpisodeLog:
    """Appends episodes to ``<folder>/<split>-00000.jsonl``, a new file every ``EPISODES_PER_FILE``.

    Example:
        >>> import tempfile
        >>> log = EpisodeLog(Path(tempfile.mkdtemp()) / "episodes")
        >>> log.write(Round(groups=()), step=0)
        >>> list(log.read())
        []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._counts: dict[str, int] = {}

    def write(self, played: Round, *, step: int) -> None:
        """Append a round's scored episodes; ``step`` is the optimizer step that the round begins.

        Those that dynamic sampling replaced, which are not trained, are marked ``filtered``.
        """
        lines: dict[Path, list[str]] = {}
        filtered = {group.task.key for group in played.filtered}
        for group in played.scored:
            for episode in group.episodes:
                path = self._path(episode.task.split)
                record = episode_record(episode, step) | {"filtered": group.task.key in filtered}
                lines.setdefault(path, []).append(json.dumps(record, ensure_ascii=False, default=str))
        for path, rows in lines.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # A lone surrogate, which utf-8 cannot hold, becomes the escape that JSON has for it.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("\n".join(rows) + "\n")

    def _path(self, split: str) -> Path:
        count = self._counts.get(split)
        if count is None:
            count = sum(1 for record in self.read() if record["split"] == split)
        self._counts[split] = count + 1
        return self.folder / f"{split}-{count // EPISODES_PER_FILE:05d}.jsonl"

    def read(self) -> Iterator[dict[str, Any]]:
        """All records written so far, oldest first within each split."""
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open(encoding="utf-8") as file:
                yield from (json.loads(line) for line in file)


def episode_record(episode: Episode, step: int) -> dict[str, Any]:
    """An episode as plain data: what happened, and the exact tokens."""
    task = episode.task
    return {
        "step": step,
        "split": task.split,
        "environment": task.environment,
        "position": task.position,
        "group_id": task.group_id,
        "seed": task.seed,
        "task_index": task.task_index,
        "sibling": episode.sibling,
        "attempt": episode.attempt,
        "reward": episode.reward,
        "rewards": dict(episode.rewards),
        "stop_reason": str(episode.stop_reason),
        "extras": dict(episode.extras),
        "turns": len(episode.turns),
        "messages": list(episode.messages),
        "prompt_length": episode.prompt_length,
        "token_ids": list(episode.token_ids),
        "mask": list(episode.mask),
        "logprobs": [round(value, 6) for value in episode.logprobs],
        "versions": list(episode.versions),
        "branches": [
            {
                "prompt_length": row.prompt_length,
                "token_ids": list(row.token_ids),
                "mask": list(row.mask),
                "logprobs": [round(value, 6) for value in row.logprobs],
                "versions": list(row.versions),
            }
            for row in episode.branches
        ],
        "seconds": {name: round(value, 6) for name, value in episode.seconds.items()},
    }
