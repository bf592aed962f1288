"""envgrad against trl, ``transformers`` and the floor, on this machine.

    python -m benchmarks --quick                       a few minutes, without trl
    python -m benchmarks --trl-path FOLDER --write     the whole comparison

trl is not among envgrad's requirements. ``make bench-trl`` puts trl 1.16.0 into a folder of its own, beside the
libraries that both sides share; or make that folder by ``pip install --no-deps --target FOLDER trl==1.16.0``.

Whole steps (``steps``), decoding alone (``decoding``) and packed against padded rows (``training``) are measured. Each
side is warm, on its best number of threads, in float32, without recomputation, and plays the same numbers of tokens;
sides take turns. Ratios are theirs over ours: above 1, we are faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .machine import QUIET, busy_share, load_average, machine_line
from .models import MissingModel, build_model, load
from .pairs import Comparison, each_workload, thread_counts
from .report import Report, decoding_table, options_text, step_line, training_table, write_section
from .workloads import QUICK, WORKLOADS

SECTIONS = ("steps", "decoding", "training")
ROOT = Path(__file__).parents[1]


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="small counts: to try it out, not to quote")
    add("--pairs", type=int, help="pairs of each comparison (default 5; 2 with --quick)")
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    add("--workloads", nargs="+", choices=tuple(WORKLOADS), help="whole steps to measure (default: all)")
    add("--trl", action="store_true", help="compare with the trl that is installed")
    add("--trl-path", type=Path, help="compare with the trl in this folder")
    add("--threads", default="auto", help="thread counts to try, as in 1,2 (default: 1 and all cores)")
    add("--splits", nargs="+", type=int, default=(1, 4), help="micro-batches to try with trl (default 1 4)")
    add("--models", nargs="+", choices=("small", "smollm2"), default=("small", "smollm2"), help="of the other sections")
    add("--batches", nargs="*", type=int, help="rows decoded together, equal lengths (default 8 32 64; 8 with --quick)")
    add("--varied-batches", nargs="*", type=int, help="the same for lengths from 8 to 128 (default 32; 8 with --quick)")
    add("--continuous-batching", action="store_true", help="transformers' continuous batching too")
    add("--vllm-python", type=Path, help="a Python that has vLLM, to decode with it too")
    add("--output", type=Path, help="JSON with all measurements (default runs/bench/TIME.json)")
    add("--write", action="store_true", help="put a section into benchmarks/RESULTS.md")
    return parser.parse_args(arguments)


def run_steps(options: argparse.Namespace, report: Report, models: Path) -> None:
    """Whole training steps, ours and trl's in turn."""
    with_trl = options.trl or options.trl_path is not None
    comparison = Comparison(
        models=models,
        kinds=("ours", "trl") if with_trl else ("ours",),
        threads=thread_counts(options.threads),
        pairs=options.pairs,
        splits=tuple(options.splits),
        search_path=() if options.trl_path is None else (str(options.trl_path.resolve()),),
    )
    names = options.workloads or (QUICK if options.quick else tuple(WORKLOADS))
    workloads = [WORKLOADS[name].quick() if options.quick else WORKLOADS[name] for name in names]
    if options.quick:
        workloads = [replace(one, pairs=options.pairs) for one in workloads]
    for workload, found in each_workload(comparison, workloads):
        if isinstance(found, Exception):
            report.failed[workload.title] = str(found)
            print(f"{workload.title}: not measured: {found}", flush=True)
            continue
        report.steps.append(found)
        if len(report.steps) == 1:
            print(options_text(report.steps), flush=True)
        print(step_line(found), flush=True)


def child(module: str, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run a section in a process of its own; what it answers is the last line of its output."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment.pop("OMP_NUM_THREADS", None)  # the section sets its threads itself
    command = [sys.executable, "-m", f"benchmarks.{module}", str(folder), json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def run_decoding(options: argparse.Namespace, report: Report, models: Path) -> None:
    """Decoding alone: envgrad, ``generate``, a bare loop, and what else was asked for."""
    jobs = [(batch, False) for batch in options.batches] + [(batch, True) for batch in options.varied_batches]
    for name in options.models:
        folder = build_model(name, models)
        for batch, varied in jobs:
            job = {
                "batch": batch, "varied": varied, "pairs": options.pairs, "longest": 16 if options.quick else 64,
                "threads": thread_counts(options.threads), "continuous_batching": options.continuous_batching,
            }  # fmt: skip
            answer = child("decoding", folder, job) | {"model": name}
            if options.vllm_python is not None:
                try:
                    answer["seconds"]["vLLM"] = decode_with_vllm(options.vllm_python, folder, job)
                except RuntimeError as error:
                    report.failed[f"vLLM, {name}, batch {batch}"] = str(error)
                    print(error, flush=True)
            report.decoding.append(answer)
            print(decoding_table([answer]), flush=True)


def decode_with_vllm(python: Path, folder: Path, values: dict[str, Any]) -> list[float]:
    """Seconds of vLLM's runs on the same prompts, on all cores. It runs behind the others, not in turn with them."""
    from .decoding import Job, prompts_of

    job = Job(**values)
    prompts = prompts_of(load(folder)[0], len(job.lengths))
    request = {"prompts": prompts, "lengths": job.lengths, "batch": job.batch, "pairs": job.pairs}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    script = str(Path(__file__).parent / "vllm_decoding.py")
    done = subprocess.run(
        [str(python), script, str(folder)], input=json.dumps(request), env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"vLLM failed: {done.stderr[-500:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return seconds


def run_training(options: argparse.Namespace, report: Report, models: Path) -> None:
    """One forward and backward, packed and padded, on all threads."""
    for name in options.models:
        folder = build_model(name, models)
        for prompt, answer in ((40, 80), (400, 40)):
            job = {
                "prompt": prompt, "answer": answer, "groups": 1 if options.quick else 2, "pairs": options.pairs,
                "threads": max(thread_counts(options.threads)),
            }  # fmt: skip
            report.training.append(child("training", folder, job) | {"model": name})
            print(training_table(report.training[-1:]), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    options.pairs = options.pairs or (2 if options.quick else 5)
    if options.batches is None:
        options.batches = (8,) if options.quick else (8, 32, 64)
    if options.varied_batches is None:
        options.varied_batches = (8,) if options.quick else (32,)
    now = datetime.now(UTC)
    report = Report(machine=machine_line(), day=now.date())
    print(report.machine)
    busy = busy_share()
    if busy is not None and busy > QUIET:
        print(f"warning: this machine is not quiet: {busy:.0%} of its cores are in use (load {load_average():.1f})")
    output = options.output or ROOT / "runs" / "bench" / f"{now:%Y-%m-%dT%H%M%S}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    models = ROOT / "build" / "bench-models"
    sections = {"steps": run_steps, "decoding": run_decoding, "training": run_training}
    began = time.perf_counter()
    for name in options.sections:
        try:
            sections[name](options, report, models)
        except (MissingModel, RuntimeError) as error:
            report.failed[name] = str(error)
            print(f"{name}: not measured: {error}", flush=True)
        output.write_text(json.dumps(report.as_dict()), encoding="utf-8")
    print(f"{time.perf_counter() - began:.0f} s; all measurements are in {output}")
    if options.write:
        write_section(report.markdown())


if __name__ == "__main__":
    main()
