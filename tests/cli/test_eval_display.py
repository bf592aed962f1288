from __future__ import annotations

import io

from rich.console import Console

from envgrad.cli.eval_display import EvalDisplay, cost_line, show_summary
from envgrad.errors import EnvironmentFailure
from envgrad.evaluation.cost import Cost, Prices
from envgrad.evaluation.summary import summarize
from envgrad.rollout.runner import Round
from envgrad.types import Episode, FailedEpisode, Group, StopReason, Task


def group(rewards: list[float | None], position: int = 0, environment: str = "game", failed: int = 0) -> Group:
    task = Task(position=position, split="eval", environment=environment, group_id=1, seed=2)
    episodes = [
        Episode(task=task, sibling=number, token_ids=(5, 6), mask=(0, 1), logprobs=(0.0, 0.0), versions=(-1, 0),
                prompt_length=1, messages=(), turns=(), stop_reason=StopReason.DONE, reward=reward)
        for number, reward in enumerate(rewards)
    ]  # fmt: skip
    error = EnvironmentFailure("gone")
    failures = [FailedEpisode(task=task, sibling=9, attempts=3, kind=error.kind, error=error) for _ in range(failed)]
    return Group(task=task, episodes=tuple(episodes), failures=tuple(failures))


def console() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def written(out: Console) -> list[str]:
    assert isinstance(out.file, io.StringIO)
    return [" ".join(line.split()) for line in out.file.getvalue().splitlines() if line.strip()]


def test_plain_progress_is_about_ten_lines_and_ends_with_all() -> None:
    out = console()
    with EvalDisplay("m on [bold]game", tasks=25, console=out, live=False) as display:
        for position in range(25):
            display.add(group([float(position % 2)], position, failed=int(position == 0)))
    lines = written(out)
    assert len(lines) == 10
    assert lines[0].startswith("3 of 25 tasks reward 0.333 1 episodes failed")
    assert lines[-1] == "25 of 25 tasks reward 0.480 1 episodes failed 0:00 left"


def test_the_live_display_shows_progress_and_gives_the_terminal_back() -> None:
    out = Console(file=io.StringIO(), width=100, force_terminal=True)
    with EvalDisplay("m on game", tasks=2, console=out, live=True) as display:
        display.add(group([1.0]))
        display.add(group([None], 1))
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "2/2" in text and "reward 1.000" in text
    assert text.endswith("\x1b[?25h")  # the cursor is shown again


def test_the_table_says_all_that_was_found() -> None:
    out = console()
    played = Round(groups=(group([1.0, 0.0]), group([0.0, 0.0], 1)), dropped=(group([None], 2, failed=1),))
    cost = Cost(tokens_in=1234, tokens_out=56, seconds=2.0, prices=Prices(per_million_in=1000.0))
    show_summary(out, summarize(played, 0.5), cost, success_reward=0.5)
    lines = written(out)
    # Task means 1/2 and 0: 12.706 times their standard error, 1/4.
    assert "reward, with its 95% interval 0.250 +- 3.177" in lines
    assert "pass@2 0.500 +- 6.353" in lines
    assert "tasks 3 (1 without a score)" in lines
    assert "ended by done 100.0%" in lines
    assert "failed: environment 1" in lines and "without a reward 1" in lines
    assert "1,234 tokens in, 56 tokens out, 2.00 seconds, price 1.234" in lines
    assert any("at least 0.5" in line for line in lines)


def test_environments_have_columns() -> None:
    out = console()
    played = Round(groups=(group([1.0], 0, "easy"), group([0.0], 1, "hard")))
    show_summary(out, summarize(played), Cost(tokens_in=1, tokens_out=1, seconds=1.0), success_reward=1.0)
    lines = written(out)
    assert lines[0] == "all easy hard"
    assert "pass@1 0.500 +- 6.353 1.000 0.000" in lines


def test_costs_of_a_server() -> None:
    cost = Cost(tokens_in=1, tokens_out=2, seconds=1.0, estimated=True, requests=3, retries=4)
    assert cost_line(cost) == (
        "1 tokens in, 2 tokens out (partly estimated: the server does not count), 1.00 seconds, "
        "3 requests and 4 repeats"
    )


def test_no_spread_is_not_shown_as_certainty() -> None:
    out = console()
    played = Round(groups=(group([0.0]), group([0.0], 1)))
    show_summary(out, summarize(played), Cost(tokens_in=1, tokens_out=1, seconds=1.0), success_reward=1.0)
    assert "pass@1 0.000 (all tasks alike)" in written(out)
