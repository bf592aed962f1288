"""Schemas are those of transformers, of any hint that it takes, key by key in the same order."""

from __future__ import annotations

import enum
import inspect
import json
import subprocess
import sys
from typing import Any, Dict, List, Literal, Optional, Tuple, Union  # noqa: UP035 - what users write

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from envgrad.environments.hints import HintError, hint_schema, read_doc
from envgrad.environments.tools import build_tool


class Way(enum.Enum):
    NORTH = "north"
    FAR = 3


PLAIN = st.sampled_from(
    [int, float, str, bool, Any, list, tuple, dict, Way, type(None), Literal["a", "b"], Literal[1, "a", None, True]]
)


def grown(inner):
    return st.one_of(
        inner.map(lambda one: list[one]),
        inner.map(lambda one: List[one]),  # noqa: UP006
        inner.map(lambda one: dict[str, one]),
        inner.map(lambda one: Dict[str, one]),  # noqa: UP006
        inner.map(lambda one: Optional[one]),  # noqa: UP045
        st.tuples(inner, inner).map(lambda two: tuple[two]),
        st.tuples(inner, inner).map(lambda two: Tuple[two]),  # noqa: UP006
        st.tuples(inner, inner).map(lambda two: Union[two]),  # noqa: UP007
        st.tuples(inner, inner, st.just(None)).map(lambda three: Union[three]),  # noqa: UP007
    )


HINTS = st.recursive(PLAIN, grown, max_leaves=5)


def with_hints(first: Any, second: Any, returns: Any):
    def tool():
        """Do it.

        It goes on.

        Args:
            first: One (of them),
                with a second line.
            second (int): Two.

        Returns:
            Nothing new.
        """

    tool.__annotations__ = {"first": first, "second": second, "return": returns}
    tool.__signature__ = inspect.Signature(
        [
            inspect.Parameter("first", inspect.Parameter.KEYWORD_ONLY, annotation=first),
            inspect.Parameter("second", inspect.Parameter.KEYWORD_ONLY, annotation=second, default=None),
        ]
    )
    return tool


@settings(max_examples=150, deadline=None)
@given(first=HINTS, second=HINTS, returns=HINTS)
def test_any_hints(first: Any, second: Any, returns: Any) -> None:
    tool = with_hints(first, second, returns)
    assert json.dumps(build_tool("tool", tool).schema) == json.dumps(get_json_schema(tool))


class Custom: ...


@pytest.mark.parametrize(
    "hint", [object, Custom, list[Custom], tuple[int], tuple[int, ...], Literal[b"x"], set[int], "text", int | Custom]
)
def test_what_json_cannot_carry(hint: Any) -> None:
    with pytest.raises(HintError):
        hint_schema(hint)


def test_a_return_that_json_cannot_carry_is_left_out() -> None:
    tool = with_hints(int, int, Custom)
    assert json.dumps(build_tool("tool", tool).schema) == json.dumps(get_json_schema(tool))
    assert "return" not in build_tool("tool", tool).schema["function"]


DOCS = [
    "One line.",
    "Text.\n\nMore text.\n\nArgs:\n    a: What.\n    b: Why: because.\n\n    c: Three.\nReturns:\n    It.",
    "Text.\n\nArgs:\n    a (int): Typed.\n    b (dict[str, int]): Typed.\n        deeper: no\n        x\n    c: C.",
    'Text.\n\nArgs:\n    a: Pick (choices: ["x ", "y"])\n    b: (Choices: [1, 2])\n    c: c\n\nRaises:\n    X: never.',
    "Text.\nArgs:\n  a: Short.\n  b:\n      On the next line.\n  c: x\n\nReturns:\n  Two\n  lines.\n\nRaises:\n  X: y",
    "Returns:\n    Only this.",
]


@pytest.mark.parametrize("doc", DOCS)
def test_docstrings(doc: str) -> None:
    def tool(a: str, b: int, c: float = 0.5) -> str:
        return ""

    full = doc if "Args:" in doc else "Text.\n\nArgs:\n    a: 1\n    b: 2\n    c: 3"
    tool.__doc__ = full
    assert json.dumps(build_tool("tool", tool).schema) == json.dumps(get_json_schema(tool))
    tool.__doc__ = doc
    assert build_tool("tool", tool).schema["function"]["name"] == "tool"


@given(st.text())
def test_any_docstring_is_read(doc: str) -> None:
    found = read_doc(doc)
    assert found.text == found.text.strip()
    assert all(name.isidentifier() or name[0].isdigit() for name in found.arguments)


def test_inspecting_an_environment_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\n"
        "from envgrad.environments.contract import inspect_environment\n"
        "from envgrad.starter.compass import Compass\n"
        "print(inspect_environment('compass', Compass)[0].tools[0].signature)\n"
        "print('LOADED', sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "move(direction" in done.stdout and "LOADED []" in done.stdout
