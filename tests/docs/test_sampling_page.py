from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"


def test_the_page_runs_and_its_numbers_are_true() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert [len(answer.token_ids) for answer in names["answers"]] == [6] * 4
    assert names["sampler"].stats.prefill_tokens == 5
