"""What was measured, as text: lines for the terminal, and a section of markdown for ``RESULTS.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from .pairs import Measured, disturbed
from .ratios import fit_line, fit_power, paired_ratios

RESULTS = Path(__file__).parent / "RESULTS.md"
NAMES = {"ours": "envgrad", "trl": "trl"}


@dataclass(slots=True, kw_only=True)
class Report:
    """All that one run found."""

    machine: str
    day: date
    steps: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    decoding: list[dict[str, Any]] = field(default_factory=list)
    """answers of ``benchmarks.decoding``, each with the ``model`` it is about"""
    training: list[dict[str, Any]] = field(default_factory=list)

    def markdown(self) -> str:
        """A section for ``RESULTS.md``."""
        parts = [f"## {self.day.isoformat()}, {self.machine}", self._quiet()]
        if self.steps:
            parts += ["### Whole steps", step_table(self.steps), options_text(self.steps)]
            fit = turns_text(self.steps)
            parts += ["### Growth with turns", fit] if fit else []
            parts += ["### Memory", memory_table(self.steps)]
        if self.decoding:
            parts += ["### Decoding alone", decoding_table(self.decoding)]
        if self.training:
            parts += ["### Forward and backward, packed and padded", training_table(self.training)]
        if self.failed:
            parts += ["### Not measured", "\n".join(f"- {name}: {why}" for name, why in self.failed.items())]
        return "\n\n".join(parts) + "\n"

    def _quiet(self) -> str:
        loads = [load for one in self.steps for load in one.loads]
        loads += [(load, busy) for one in (*self.decoding, *self.training) for load, busy in one["loads"]]
        if not loads:
            return ""
        noisy = len(disturbed(loads))
        text = f"Medians over pairs, with the range. Load average before the pairs: {median(a for a, _ in loads):.1f}. "
        if noisy:
            return text + f"**Not quiet: before {noisy} of {len(loads)} pairs other programs used the processor.**"
        return text + "Nothing else used the processor before any of them."

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine, "day": self.day.isoformat(), "steps": [one.as_dict() for one in self.steps],
            "failed": self.failed, "decoding": self.decoding, "training": self.training,
        }  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table.

    Example:
        >>> print(table(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = [head, *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(head), *text[1:]])


def step_line(one: Measured) -> str:
    """One workload for the terminal."""
    parts = [f"{one.workload.title}:"]
    for kind in one.steps:
        parts.append(
            f"  {NAMES[kind]:8s} {one.seconds(kind).text(3)} s on {one.settings[kind]} (rollout "
            f"{median(step.rollout for step in one.steps[kind]):.3f}, train "
            f"{median(step.train for step in one.steps[kind]):.3f}), {one.distance(kind).text(1)} x the floor, memory "
            f"{one.memory(kind) / 2**20:.0f} MiB"
        )
    counts = one.steps["ours"][-1].counts
    tokens = ", ".join(f"{sum(counts[name]):,} {name}" for name in ("prompt", "sampled", "given"))
    same = "; trl counts the same" if "trl" in one.steps else ""
    parts.append(f"  tokens: {tokens}; {counts['calls']} tool calls{same}")
    parts.append(
        f"  forwarded over needed: rollout {one.forwarded_ratio('rollout'):.3f}, training "
        f"{one.forwarded_ratio('training'):.3f}; floor {one.floor.seconds(one.workload.part):.3f} s at "
        f"{max(one.rates) / 1e9:.0f} GFLOP/s"
    )
    if one.ratio is not None:
        parts.append(f"  ratio {one.ratio.text()}")
    for index in disturbed(one.loads):
        load, busy = one.loads[index]
        parts.append(f"  warning: before pair {index + 1} others used {busy:.0%} of the cores (load {load:.1f})")
    return "\n".join(parts)


def step_table(steps: Sequence[Measured]) -> str:
    head = ["work", "sampled tokens, calls", "envgrad, s", "trl, s", "trl / envgrad", "rollout", "train"]
    head += ["floor, s", "envgrad / floor", "run on"]
    rows = []
    for one in steps:
        compared = "trl" in one.steps
        counts = one.steps["ours"][-1].counts
        parts = [one.ratio_of("rollout"), one.ratio_of("train")]
        rows.append(
            [
                one.workload.title,
                f"{sum(counts['sampled']):,}, {counts['calls']}",
                one.seconds("ours").text(3),
                one.seconds("trl").text(3) if compared else "",
                ""
                if one.ratio is None
                else f"**{one.ratio.median:.2f}** ({one.ratio.low:.2f} to {one.ratio.high:.2f})",
                *("" if ratio is None else f"{ratio.median:.2f}" for ratio in parts),
                f"{one.floor.seconds(one.workload.part):.3f}",
                f"{one.distance('ours').median:.1f}",
                " / ".join(str(one.settings[kind]) for kind in one.steps),
            ]
        )
    return table(head, rows)


def options_text(steps: Sequence[Measured]) -> str:
    """The configurations, where both sides agree and where not; and the tokens counted."""
    lines = []
    for version, options in steps[0].options.items():
        others = [found for name, found in steps[0].options.items() if name != version]
        own = {name: value for name, value in options.items() if any(name not in other for other in others)}
        lines.append(f"Only {version}: `{own}`." if own and others else "")
    options = next(iter(steps[0].options.values()))
    every = [set(one) for one in steps[0].options.values()]
    shared = {name: value for name, value in options.items() if all(name in names for names in every)}
    lines.insert(0, f"Options of the first line (all else at its default): `{shared}`.")
    forwarded = max(max(one.forwarded_ratio("rollout"), one.forwarded_ratio("training")) for one in steps)
    lines.append(f"envgrad forwarded at most {forwarded:.3f} times the tokens that must be forwarded.")
    if any("trl" in one.steps for one in steps):
        lines.append("Both sides counted the same prompt, sampled and given tokens and calls in every step.")
    return " ".join(line for line in lines if line)


def turns_text(steps: Sequence[Measured]) -> str:
    """How seconds grow with tool calls in the small model's workloads; empty with fewer than three of them."""
    chosen = sorted((one for one in steps if one.workload.name.startswith("small-")), key=lambda m: m.workload.calls)
    if len(chosen) < 3:
        return ""
    calls = [float(one.workload.calls) for one in chosen]
    rows = []
    for kind in chosen[0].steps:
        if not all(kind in one.steps for one in chosen):
            continue
        seconds = [one.seconds(kind, "step").median for one in chosen]
        line, power = fit_line(calls, seconds), fit_power(calls, seconds)
        found = ", ".join(f"{value:.2f}" for value in seconds)
        fit = f"{line.offset:.2f} + {1000 * line.slope:.1f}/1000 * calls"
        rows.append([NAMES[kind], found, fit, f"{line.explained:.3f}", f"{power:.2f}"])
    names = ", ".join(f"{one:.0f}" for one in calls)
    return table(["side", f"seconds at {names} calls", "straight line", "R^2", "exponent"], rows)


def memory_table(steps: Sequence[Measured]) -> str:
    """High-water marks above model, gradients and optimizer."""
    rows = []
    for one in steps:
        found = {kind: one.memory(kind) / 2**20 for kind in one.steps}
        share = f"{found['ours'] / found['trl']:.2f}" if found.get("trl") else ""
        settings = " / ".join(str(one.settings[kind]) for kind in one.steps)
        theirs = f"{found['trl']:.0f}" if "trl" in found else ""
        rows.append([one.workload.title, f"{found['ours']:.0f}", theirs, share, settings])
    return table(["work", "envgrad, MiB", "trl, MiB", "envgrad / trl", "run on"], rows)


def decoding_table(answers: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second of each engine, and envgrad's rate over the others'."""
    engines = list(dict.fromkeys(name for one in answers for name in one["seconds"]))
    head = ["model", "batch", "lengths", *(f"{name}, tok/s" for name in engines)]
    head += [f"envgrad / {name}" for name in engines if name != "envgrad"]
    rows = []
    for one in answers:
        job, seconds = one["job"], one["seconds"]
        shortest, longest = (8, 2 * job["longest"]) if job["varied"] else (job["longest"],) * 2
        lengths = f"{shortest} to {longest}, {2 * job['batch']} prompts" if job["varied"] else f"all {longest}"
        row = [one["model"], str(job["batch"]), lengths]
        row += [f"{one['tokens'] / median(seconds[name]):.0f}" if name in seconds else "" for name in engines]
        for name in engines:
            if name != "envgrad":
                row.append(paired_ratios(seconds["envgrad"], seconds[name]).text() if name in seconds else "")
        rows.append(row)
    return table(head, rows)


def training_table(answers: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in answers:
        job, packed, padded = one["job"], one["seconds"]["packed"], one["seconds"]["padded"]
        work = f"{8 * job['groups']} rows, prompt {job['prompt']}, answers to {job['answer']}"
        ratio, share = paired_ratios(packed, padded).text(), one["floor"] / median(packed)
        rows.append([one["model"], work, f"{median(packed):.3f}", f"{median(padded):.3f}", ratio, f"{share:.0%}"])
    return table(["model", "work", "packed, s", "padded, s", "padded / packed", "of the matmul rate"], rows)


def write_section(text: str, path: Path = RESULTS) -> None:
    """Put ``text`` before the other sections of the results."""
    found = path.read_text(encoding="utf-8")
    head, mark, rest = found.partition("\n## ")
    path.write_text(
        f"{head.rstrip()}\n\n{text.rstrip()}\n{mark}{rest}" if mark else f"{head}\n\n{text}", encoding="utf-8"
    )
