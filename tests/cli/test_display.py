from __future__ import annotations

import io
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from rich.console import Console

from envgrad.cli.display import RunDisplay
from envgrad.rollout.runner import Round
from envgrad.types import Episode, Group, StopReason, Task

HOSTILE = "[/red][bold]hi[/bold]\x1b[2J\x1b]0;owned\x07"


@dataclass
class Player:
    last_round: Round | None = None
    doing: str | None = None


def played(reward: float, environments: tuple[str, ...] = ("grid",)) -> Round:
    groups = []
    for name in environments:
        task = Task(position=0, split="train", environment=name, group_id=1, seed=2)
        episode = Episode(
            task=task, sibling=0, token_ids=(1, 2, 3), mask=(0, 1, 1), logprobs=(0.0, -1.0, -1.0), versions=(-1, 0, 0),
            prompt_length=1, messages=({"role": "user", "content": HOSTILE},), turns=(), stop_reason=StopReason.DONE,
            reward=reward,
        )  # fmt: skip
        groups.append(Group(task=task, episodes=(episode,)))
    return Round(groups=tuple(groups), seconds=0.0)


def console(width: int = 100, *, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=40, force_terminal=terminal, color_system=None, legacy_windows=False
    )


def written(display: RunDisplay) -> str:
    assert isinstance(display.console.file, io.StringIO)
    return display.console.file.getvalue()


def run(display: RunDisplay, rounds: list[Round], *, logging_steps: int = 1) -> None:
    """The events of a training loop, in its order."""
    player = Player()
    display.attach(player)
    state = SimpleNamespace(global_step=0, max_steps=len(rounds))
    display.on_train_begin(None, state, None)  # type: ignore[arg-type]
    for step, one in enumerate(rounds, start=1):
        display.on_step_begin(None, state, None)  # type: ignore[arg-type]
        player.last_round = one
        display.on_pre_optimizer_step(None, state, None)  # type: ignore[arg-type]
        state.global_step = step
        display.on_step_end(None, state, None)  # type: ignore[arg-type]
        if step % logging_steps == 0:
            display.on_log(None, state, None, logs={"loss": 0.25, "reward": 9.0})  # type: ignore[arg-type]
    display.on_log(None, state, None, logs={"train_runtime": 1.0})  # type: ignore[arg-type]
    display.on_train_end(None, state, None)  # type: ignore[arg-type]


def test_plain_lines_one_per_logged_step_with_the_mean_since_the_last() -> None:
    with RunDisplay("m on e", console=console()) as display:
        run(display, [played(0.0), played(0.5), played(1.0), played(1.0), played(0.25)], logging_steps=2)
    lines = written(display).splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 2/5", "reward 0.250"],
        ["step 4/5", "reward 1.000"],
        ["step 5/5", "reward 0.250"],
    ]
    assert "loss 0.25" in lines[0]
    assert "failures 0" in lines[0]
    assert lines[0].endswith("left")


def test_plain_lines_name_each_environment_where_there_are_several() -> None:
    with RunDisplay("m on e", console=console()) as display:
        run(display, [played(0.5, ("a", "b\x1b[2J"))])
    (line,) = written(display).splitlines()
    assert "a 0.500  b 0.500" in line


def test_evaluation_is_a_line_of_its_own() -> None:
    display = RunDisplay("m on e", console=console())
    display.on_evaluate(None, SimpleNamespace(global_step=3), None, metrics={"eval_reward": 0.75, "eval_x": 1.0})  # type: ignore[arg-type]
    assert written(display).strip() == "evaluation at step 3  eval_reward 0.750"


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_live_view_shows_progress_and_an_inert_sample(width: int) -> None:
    out = console(width, terminal=True)
    display = RunDisplay(f"m on {HOSTILE}", console=out)
    assert display.live
    run(display, [played(0.0, ("a", "b")), played(1.0, ("a", "b"))])
    with out.capture() as captured:
        out.print(display.render())
    text = captured.get()
    for words in (
        "step 2/2",
        "done",
        "1.000",
        "from 0.000",
        "rollout",
        "optimizer and",
        "episodes/s",
        "failures 0",
        "loss 0.25",
    ):
        assert words in " ".join(text.split())
    assert "[/red][bold]hi[/bold]" in text
    assert "owned" not in text
    assert "\x1b[2J" not in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_the_live_view_works_before_the_first_step() -> None:
    out = console(terminal=True)
    with out.capture() as captured:
        out.print(RunDisplay("m on e", console=out).render())
    assert "step 0/?" in captured.get()


def test_the_live_view_says_what_most_of_the_time_is_spent_on() -> None:
    display = RunDisplay("a run", console=console(terminal=True))
    state = SimpleNamespace(global_step=1, max_steps=2)
    display.on_train_begin(None, state, None)  # type: ignore[arg-type]
    shares = {"decode": 0.5, "tools": 0.25, "idle": 0.1, "forward_backward": 0.08, "reset": 0.05, "publish": 0.02}
    logs = {f"share/{name}": share for name, share in shares.items()}
    display.on_log(None, state, None, logs=logs)  # type: ignore[arg-type]
    display.on_log(None, state, None, logs={"train_runtime": 1.0})  # type: ignore[arg-type]
    with display.console.capture() as capture:
        display.console.print(display.render())
    line = next(line for line in capture.get().splitlines() if line.startswith("spent on"))
    assert line.split()[2:] == ["decode", "50%", "tools", "25%", "idle", "10%", "forward", "backward", "8%",
                                "reset", "5%"]  # fmt: skip


def test_the_terminal_is_given_back_on_an_error() -> None:
    out = console(terminal=True)
    with pytest.raises(KeyboardInterrupt), RunDisplay("m on e", console=out):
        assert "\x1b[?25l" in out.file.getvalue()  # type: ignore[attr-defined]  # the cursor is hidden
        raise KeyboardInterrupt
    assert out.file.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in out.file.getvalue()  # type: ignore[attr-defined]


def test_an_evaluation_names_rewards_intervals_and_every_dataset() -> None:
    display = RunDisplay("m on e", console=console())
    metrics = {"eval_reward": 0.75, "eval_reward_ci95": 0.1, "eval_pass@1": 0.5, "eval_pass@1_ci95": 0.0,
               "eval_reward/a": 1.0, "eval_reward_ci95/a": 0.2, "eval_hard_reward": 0.25, "eval_reward_std": 9.0,
               "eval_rewards/a/mean": 9.0, "eval_time/rollout": 9.0}  # fmt: skip
    display.on_evaluate(None, SimpleNamespace(global_step=3), None, metrics=metrics)  # type: ignore[arg-type]
    assert written(display).strip().split("  ")[1:] == [
        "eval_reward 0.750 +- 0.100",
        "eval_pass@1 0.500",
        "eval_reward/a 1.000 +- 0.200",
        "eval_hard_reward 0.250",
    ]


@pytest.mark.parametrize("doing", ["evaluating, 3 of 100 tasks", "installing weights of step 7"])
def test_the_live_view_names_long_work_beside_the_steps(doing: str) -> None:
    out = console(80, terminal=True)
    display = RunDisplay("m on e", console=out)
    display.attach(Player(doing=doing))
    display.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=4), None)  # type: ignore[arg-type]
    with out.capture() as captured:
        out.print(display.render())
    assert doing in " ".join(captured.get().split())


def test_samples_rotate_in_a_long_step_too() -> None:
    out = console(terminal=True)
    display = RunDisplay("m on e", console=out)
    run(display, [played(0.0, ("a", "b"))])
    shown = []
    for _ in range(2):
        display._sample_since -= 100
        with out.capture() as captured:
            out.print(display.render())
        shown.append("".join(line for line in captured.get().splitlines() if line.startswith("sample")))
    assert "a train/0" in shown[1] and "b train/0" in shown[0]


def test_samples_rotate() -> None:
    display = RunDisplay("m on e", console=console())
    run(display, [played(0.0, ("a", "b"))])
    first = display._sample
    display._sample_since -= 100
    display._choose_sample()
    assert first is not None
    assert display._sample is not None
    assert (first.task.environment, display._sample.task.environment) == ("a", "b")
