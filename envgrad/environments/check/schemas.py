"""Whether a chat template can show the tools: it writes their schemas as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from envgrad.environments.check.bench import Bench, CallFailed
from envgrad.environments.check.report import Level, Rule
from envgrad.environments.tools import ToolSpec

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_schemas(bench: Bench, tools: Sequence[ToolSpec]) -> None:
    """Schemas are JSON, names are ones that every template and server takes, and a model can read what tools do.

    Raises:
        CallFailed: a schema is no JSON.
    """
    broken: CallFailed | None = None
    for tool in tools:
        try:
            json.dumps(tool.schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            fix = "Give parameters types and choices that JSON has: strings, numbers, true, false, lists, dicts."
            broken = bench.fail(Rule.SCHEMA, tool.name, f"its schema cannot be rendered: {error}.", fix)
        if _NAME.fullmatch(tool.name) is None:
            seen = "its name has characters that chat templates and servers may refuse."
            bench.find(Level.WARNING, Rule.SCHEMA, tool.name, seen, "Use letters, digits, _ and -, 64 at most.")
        elif not tool.schema["function"].get("description"):
            seen = "it has no docstring, so the model is not told what it does."
            bench.find(
                Level.NOTE, Rule.SCHEMA, tool.name, seen, "Describe the tool, and each argument, in its docstring."
            )
    if broken is not None:
        raise broken
