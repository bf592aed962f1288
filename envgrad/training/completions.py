"""``log_completions``: what the policy wrote, with rewards and advantages, at each log.

Consumes the last round and its samples; produces a table on the console, a Parquet file under
``output_dir/completions`` and, where ``report_to`` names wandb or trackio, a table there.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from envgrad.config import RolloutConfig
from envgrad.environments.boundary import Raised, guard
from envgrad.errors import first_line
from envgrad.rollout.runner import Round
from envgrad.types import Episode, Message, TrainingSample

logger = logging.getLogger(__name__)

TABLE_REPORTERS = ("wandb", "trackio")
"""values of ``report_to`` that show tables"""

Half: TypeAlias = str | list[Message]
"""plain text, or chat messages"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow:
    """One episode as a row."""

    prompt: Half
    completion: Half
    rewards: Mapping[str, float | None]
    advantage: float | None
    """mean over the sampled tokens; None where the episode could not be scored"""
    extras: Mapping[str, object]
    """what reward functions gave to ``log_extra``"""


def completion_rows(played: Round, samples: Sequence[TrainingSample]) -> list[CompletionRow]:
    """A row for each episode of ``played``, in order; ``samples`` are the round's."""
    advantages = mean_advantages(samples)
    rows = []
    for group in played.groups:
        for episode in group.episodes:
            prompt, completion = split_episode(episode)
            rows.append(
                CompletionRow(
                    prompt=prompt,
                    completion=completion,
                    rewards=episode.rewards,
                    advantage=advantages.get(episode.key),
                    extras=episode.extras,
                )
            )
    return rows


def mean_advantages(samples: Sequence[TrainingSample]) -> dict[tuple[str, int], float]:
    """Each episode's advantage by its key: the mean over its sampled tokens."""
    return {
        sample.episode.key: sum(sample.advantages) / max(1, sample.num_trained_tokens)
        for sample in samples
        if sample.episode is not None
    }


def split_episode(episode: Episode) -> tuple[Half, Half]:
    """The opening, and what came after it: chat messages, or two texts where no chat template was used."""
    first = episode.main_turns[0].message if episode.turns else None
    start = next((i for i, message in enumerate(episode.messages) if message is first), len(episode.messages))
    after = list(episode.messages[start:])
    if episode.plain_prompt is not None:
        return episode.plain_prompt, "".join(str(message.get("content") or "") for message in after)
    return list(episode.messages[:start]), after


@dataclass(slots=True, kw_only=True)
class CompletionLog:
    """Keeps the last round's rows and shows them when the trainer logs.

    Args:
        folder: Where the Parquet files go, one for each log.
        limit: Rows on the console, drawn at random; None for all.
        unique_prompts: One row of each prompt on the console and in the reporters' tables.
        reporters: The values of ``report_to``; of ``TABLE_REPORTERS`` those get a table.
    """

    folder: Path
    limit: int | None
    unique_prompts: bool
    reporters: Sequence[str] = ()
    seed: int = 0
    console: Console = field(default_factory=Console)
    rows: list[CompletionRow] = field(default_factory=list)
    _failed: set[str] = field(default_factory=set, init=False)

    def record(self, played: Round, samples: Sequence[TrainingSample]) -> None:
        self.rows = completion_rows(played, samples)

    def show(self, step: int) -> None:
        """Write, report and print the rows; ``step`` is the number of optimizer steps made."""
        if not self.rows:
            return
        shown = _first_of_each_prompt(self.rows) if self.unique_prompts else self.rows
        self._write(step)
        self._report(shown, step)
        if self.limit is not None and self.limit < len(shown):
            chosen = random.Random(f"{self.seed}/{step}").sample(range(len(shown)), self.limit)
            shown = [shown[index] for index in sorted(chosen)]
        self.console.print(completions_table(shown, step))

    def _write(self, step: int) -> None:
        from datasets import Dataset

        self.folder.mkdir(parents=True, exist_ok=True)
        records = _records(self.rows, step)
        Dataset.from_list(records).to_parquet(str(self.folder / f"completions_{step:05d}.parquet"))

    def _report(self, rows: Sequence[CompletionRow], step: int) -> None:
        for name in TABLE_REPORTERS:
            if name in self.reporters:
                outcome = guard(_log_table, name, _records(rows, step))
                if isinstance(outcome, Raised) and name not in self._failed:
                    self._failed.add(name)
                    logger.warning(
                        "report_to=%r has not taken the table of completions (%s); the run goes on, and this is said "
                        "once. The table is in %s too",
                        name, first_line(outcome.error), self.folder,
                    )  # fmt: skip


def _log_table(name: str, records: list[dict[str, object]]) -> None:
    import pandas

    backend = importlib.import_module(name)
    backend.log({"completions": backend.Table(dataframe=pandas.DataFrame(records))})


def completion_log(config: RolloutConfig, report_to: Sequence[str] | str | None) -> CompletionLog | None:
    """The log that ``config`` asks for."""
    if not config.log_completions:
        return None
    return CompletionLog(
        folder=Path(config.output_dir) / "completions",
        limit=config.num_completions_to_print,
        unique_prompts=config.log_unique_prompts,
        reporters=(report_to,) if isinstance(report_to, str) else tuple(report_to or ()),
        seed=config.seed,
    )


def _first_of_each_prompt(rows: Sequence[CompletionRow]) -> list[CompletionRow]:
    return list({repr(row.prompt): row for row in reversed(rows)}.values())[::-1]


def _names(rows: Sequence[CompletionRow]) -> tuple[list[str], list[str]]:
    """The reward components and the extra columns that any row has, in order of appearance."""
    rewards = dict.fromkeys(name for row in rows for name in row.rewards)
    return list(rewards), list(dict.fromkeys(name for row in rows for name in row.extras))


def _records(rows: Sequence[CompletionRow], step: int) -> list[dict[str, object]]:
    """Rows as plain columns. Chats are text, so that messages of different shape fit one column."""
    rewards, extras = _names(rows)
    return [
        {"step": step, "prompt": _plain(row.prompt), "completion": _plain(row.completion)}
        | {name: row.rewards.get(name) for name in rewards}
        | {name: row.extras.get(name) for name in extras}
        | {"advantage": row.advantage}
        for row in rows
    ]


def _plain(half: Half) -> str:
    return _text(half).plain


def completions_table(rows: Sequence[CompletionRow], step: int) -> Panel:
    """The table on the console: prompt, completion, and below each other what they earned.

    Example:
        >>> row = CompletionRow(prompt="1+1=", completion="2", rewards={"exact": 1.0}, advantage=0.5, extras={})
        >>> completions_table([row], 3).title
        'Step 3'
    """
    table = Table(box=None, expand=True, header_style="bold", padding=(0, 1, 1, 1))
    table.add_column("Prompt", ratio=1, overflow="fold", style="yellow")
    table.add_column("Completion", ratio=1, overflow="fold", style="green")
    table.add_column("Rewards", max_width=36, overflow="fold", style="cyan")
    for row in rows:
        table.add_row(_text(row.prompt), _text(row.completion), _scores(row))
    return Panel(table, title=f"Step {step}")


def _scores(row: CompletionRow) -> Text:
    numbers = {**row.rewards, "advantage": row.advantage}
    lines = [f"{name} {'-' if value is None else f'{value:.2f}'}" for name, value in numbers.items()]
    return Text("\n".join([*lines, *(f"{name}: {value}" for name, value in row.extras.items())]))


def _text(half: Half) -> Text:
    """A chat as ``ROLE text`` blocks, with its calls; plain text as it is."""
    if isinstance(half, str):
        return Text(half)
    parts = []
    for message in half:
        text = Text(f"{message.get('role', '')}: ", style="bold")
        body = str(message.get("reasoning_content") or "") + _content(message.get("content"))
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            body += f"{function.get('name')}({function.get('arguments')})"
        parts.append(text.append(body, style="not bold"))
    return Text("\n").join(parts)


def _content(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(block.get("text", "")) for block in content if isinstance(block, Mapping))
    return str(content or "")
