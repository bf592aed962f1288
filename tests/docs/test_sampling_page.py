from __future__ import annotations

from helpers.pages import run_python


def test_the_page_runs_and_its_numbers_are_true() -> None:
    names = run_python("sampling")
    assert [len(answer.token_ids) for answer in names["answers"]] == [6] * 4
    assert names["sampler"].stats.prefill_tokens == 5
