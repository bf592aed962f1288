"""A child process that reads and compares mathematical expressions: ``python -m envgrad.rewards.math_worker``.

One request per line on standard input, two replies per request on standard output, all in JSON::

    {"gold": text, "answer": text}
    null or the gold expression                        null: it cannot be read, and nothing more follows
    {"answer": null or expression, "equal": bool}

Reading a sampled answer can take for ever: ``99999^{99999999}`` is one power of whole numbers, which neither a signal
nor another thread can interrupt. A process can be ended from outside, so a comparison happens in one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Callable
from functools import cache

from envgrad.environments.arguments import shorten
from envgrad.environments.boundary import Ok, guard

SECONDS = 3
"""of one reading or comparison, where math-verify's own alarm can interrupt it"""
CPU_SECONDS = 20
"""of one request; the system then ends the process, even if nobody waits for it any more"""
MEMORY = 4 << 30
"""bytes"""
SHOWN = 500
"""characters of an expression that are sent back"""


def serve() -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")
    os.dup2(2, 1)  # whatever else prints, prints elsewhere

    def reply(value: object) -> None:
        print(json.dumps(value), file=replies)

    _limit(resource.RLIMIT_AS, MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    read_gold, read_answer, equal = _math()
    read_gold("$1$")  # its grammar is compiled once
    reply("ready")
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + CPU_SECONDS)
        request = json.loads(line)
        gold = read_gold(request["gold"])
        if not gold:
            reply(None)
            continue
        reply(_shown(gold))
        answer = read_answer(request["answer"])
        outcome = guard(equal, gold, answer) if answer else Ok(False, 0.0)
        same = isinstance(outcome, Ok) and bool(outcome.value)
        reply({"answer": _shown(answer) if answer else None, "equal": same})


def _math() -> tuple[Callable[[str], list[object]], Callable[[str], list[object]], Callable[..., object]]:
    """How a gold answer is read, how a sampled one is read, and how both are compared."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # A sampled answer counts only in LaTeX, a box before anything else.
    sampled = LatexExtractionConfig(
        boxed_match_priority=0, normalization_config=NormalizationConfig(units=True), try_extract_without_anchor=False
    )

    @cache  # siblings share their gold answer
    def read_gold(text: str) -> list[object]:
        return _read(parse, text, parsing_timeout=SECONDS)

    def read_answer(text: str) -> list[object]:
        options = {"extraction_config": [sampled], "extraction_mode": "first_match"}
        return _read(parse, text, parsing_timeout=SECONDS, **options)

    def equal(gold: list[object], answer: list[object]) -> object:
        return verify(gold, answer, timeout_seconds=SECONDS)

    return read_gold, read_answer, equal


def _read(parse: Callable[..., object], text: str, **options: object) -> list[object]:
    outcome = guard(parse, text, **options)
    return outcome.value if isinstance(outcome, Ok) and isinstance(outcome.value, list) else []


def _shown(parsed: list[object]) -> str:
    outcome = guard(str, parsed)  # whole numbers of thousands of digits do not print
    return shorten(str(outcome.value), SHOWN) if isinstance(outcome, Ok) else shorten(str(parsed[-1]), SHOWN)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with contextlib.suppress(ValueError, OSError):  # not every system has every limit
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    serve()
