"""Small tasks of Harbor, written into a folder."""

from __future__ import annotations

from pathlib import Path

CHECK = """#!/bin/bash
if [ "$(cat /app/answer.txt 2>/dev/null)" = "{answer}" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo "the answer is wrong"
  echo 0 > /logs/verifier/reward.txt
fi
"""
DOCKERFILE = "FROM debian:bookworm\nWORKDIR /app\nCOPY numbers.txt data/\n"


def write_task(
    folder: Path,
    name: str = "sum",
    *,
    numbers: str = "3 4",
    answer: str = "7",
    test: str | None = None,
    dockerfile: str = DOCKERFILE,
    config: str = "",
) -> Path:
    """A task: add the numbers of a file, and write the sum to another."""
    task = folder / name
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text(f'schema_version = "1.4"\n[verifier]\ntimeout_sec = 60.0\n{config}')
    (task / "instruction.md").write_text(f"Write the sum of /app/data/numbers.txt to /app/answer.txt. ({name})\n")
    (task / "environment" / "Dockerfile").write_text(dockerfile)
    (task / "environment" / "numbers.txt").write_text(numbers)
    (task / "tests" / "test.sh").write_text(CHECK.format(answer=answer) if test is None else test)
    return task


def write_tasks(folder: Path, count: int) -> Path:
    """``count`` tasks, whose answers are 3, 4, ..."""
    for index in range(count):
        write_task(folder, f"sum-{index:02d}", numbers=f"{index} 3", answer=str(index + 3))
    return folder
