"""``envgrad check``: what ``check_environment`` found, as tables or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envgrad.agents.checking import check_environment
from envgrad.cli.locate import locate
from envgrad.cli.text import printable, shorten
from envgrad.environments.check import AuditRow, CheckReport, Determinism, Finding, Level
from envgrad.environments.start import StartMode
from envgrad.errors import ConfigurationError

_STYLES = {Level.BREACH: "bold red", Level.WARNING: "yellow", Level.NOTE: "dim"}
_MAX_SHOWN = 600
_TASKS = {
    Determinism.FIXED: "every reset gives the same task",
    Determinism.TASK: "the task's index or row decides the task",
    Determinism.SEEDED: "seed or group_id decides the task",
    Determinism.NONE: "no id decides the whole episode",
}
_STARTS = {
    StartMode.IDENTITY: "siblings are reset with the same ids",
    StartMode.ROW: "siblings are reset with the same row",
    StartMode.FORK: "one is reset, and fork() makes its siblings",
    StartMode.COPY: "one is reset, and its siblings are copies",
    StartMode.INDEPENDENT: "siblings are reset one by one",
}


def run_check(
    environment: str,
    *,
    rows: Sequence[str],
    groups: int,
    turns: int,
    seed: int,
    timeout: float,
    as_json: bool,
) -> None:
    """Check the environment and show the report on the standard output, alone: what it prints itself goes to stderr.

    Raises:
        ConfigurationError: no such class, or a row that is no JSON object.
        typer.Exit: code 1 if the contract is broken.
    """
    with redirect_stdout(sys.stderr):
        report = check_environment(
            locate(environment),
            dataset_row=[read_row(row) for row in rows] or None,
            groups=groups,
            turns=turns,
            seed=seed,
            timeout=timeout,
        )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, allow_nan=False))
    else:
        show_report(Console(), report)
    if not report.ok:
        raise typer.Exit(1)


def read_row(text: str) -> Mapping[str, Any]:
    """A dataset's row from the command line.

    Raises:
        ConfigurationError: no JSON object.

    Example:
        >>> read_row('{"question": "1 + 1?"}')
        {'question': '1 + 1?'}
    """
    try:
        row: object = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"--row {shorten(text, 60)} is not JSON ({error}); write '{{\"column\": value}}'"
        ) from error
    if not isinstance(row, dict):
        raise ConfigurationError(f"--row {shorten(text, 60)} is not a JSON object; write '{{\"column\": value}}'")
    return row


def show_report(console: Console, report: CheckReport) -> None:
    """The verdict, what was seen, the findings and the audit."""
    console.print(_verdict(report))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    if report.determinism is not None:
        facts.add_row("tasks", _said(report.determinism, _TASKS[report.determinism]))
    if report.start is not None:
        facts.add_row("group start", _said(report.start, _STARTS[report.start]))
    for number, tool in enumerate(report.tools):
        facts.add_row("" if number else "tools", Text(shorten(printable(tool), 200)))
    console.print(facts)
    if report.findings:
        console.print()
        console.print(_findings_table(report.findings))
    if report.audit:
        console.print()
        console.print(_audit_table(report))


def _verdict(report: CheckReport) -> Text:
    name = printable(report.environment)
    breaches, warnings = len(report.at(Level.BREACH)), len(report.at(Level.WARNING))
    counted = [_count(number, word) for number, word in ((breaches, "breach"), (warnings, "warning")) if number]
    verdict = Text(f"{name}: ", style="bold")
    if report.ok:
        verdict.append("keeps the contract", style="bold green")
    else:
        verdict.append("breaks the contract", style="bold red")
    return verdict.append(f" ({', '.join(counted)})" if counted else "", style="default not bold")


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{plural if number != 1 else ''}"


def _said(word: str, meaning: str) -> Text:
    return Text.assemble((str(word), "bold"), f": {meaning}")


def _findings_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), expand=True)
    table.add_column("level", no_wrap=True)
    table.add_column("member", max_width=18, overflow="fold")
    table.add_column("what was seen, and the fix", ratio=1, overflow="fold")
    for number, finding in enumerate(findings):
        said = Text(shorten(printable(finding.seen), _MAX_SHOWN))
        said.append(f"\nfix: {shorten(printable(finding.fix), _MAX_SHOWN)}", style="green")
        table.add_row(
            Text(str(finding.level), style=_STYLES[finding.level]),
            Text(printable(finding.member)),
            said,
            end_section=number + 1 < len(findings),
        )
    return table


def _audit_table(report: CheckReport) -> Table:
    title = "What agents without a model earn"
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
        expand=True,
    )
    table.add_column("agent", no_wrap=True)
    table.add_column("what it does", ratio=1, overflow="fold")
    table.add_column("episodes", justify="right")
    table.add_column("lowest", justify="right")
    table.add_column("highest", justify="right")
    table.add_column("mean", justify="right")
    table.add_column("")
    for row in report.audit:
        table.add_row(*_audit_cells(row), style="yellow" if row.suspicious else "")
    if report.failure is not None:
        table.caption = f"An honest failure earns {report.failure:.3g}."
        table.caption_justify = "left"
    return table


def _audit_cells(row: AuditRow) -> tuple[str, str, str, str, str, str, str]:
    scored = [reward for reward in row.rewards if reward is not None]
    low, high = (f"{min(scored):.3g}", f"{max(scored):.3g}") if scored else ("-", "-")
    mean = "-" if row.mean is None else f"{row.mean:.3g}"
    return row.agent, row.does, str(len(row.rewards)), low, high, mean, "hack?" if row.suspicious else ""
