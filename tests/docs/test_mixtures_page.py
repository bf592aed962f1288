from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "mixtures.md"


def test_the_page_runs_and_does_what_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    records = list(names["trainer"].episode_log.read())
    # four groups: three of "copy" with four siblings, one of "count" with two
    assert Counter(record["environment"] for record in records) == {"copy": 12, "count": 2}
    assert names["trainer"].state.global_step == 2
