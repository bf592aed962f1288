from __future__ import annotations

import io

from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from envgrad import RichProgressCallback
from envgrad.compat.progress import metric_tables


def test_a_run_is_shown_and_the_panel_is_gone_at_the_end(tmp_path):
    console = Console(file=io.StringIO(), width=90, force_terminal=True)
    callback = RichProgressCallback(console)
    args, control = TrainingArguments(output_dir=str(tmp_path)), TrainerControl()
    state = TrainerState(max_steps=4, is_world_process_zero=True)
    callback.on_train_begin(args, state, control)
    state.global_step = 2
    callback.on_step_end(args, state, control)
    callback.on_log(args, state, control, logs={"loss": 0.25, "rewards/exact/mean": 0.5, "note": "text"})
    callback.on_train_end(args, state, control)
    shown = console.file.getvalue()
    for words in ("Training", "50%", "Step 2", "rewards", "exact/mean", "0.500", "loss", "0.250", "text"):
        assert words in shown, words
    callback.on_log(args, state, control, logs={"loss": 9.0})
    assert "9.000" not in console.file.getvalue()


def test_metrics_are_grouped_by_the_first_part_of_their_name():
    console = Console(file=io.StringIO(), width=60)
    for panel in metric_tables({"a/x": 1, "b": 2.0, "a/y/z": 3}):
        console.print(panel)
    shown = console.file.getvalue()
    assert shown.index("x") < shown.index("y/z") < shown.index("2.000")


def test_other_processes_show_nothing(tmp_path):
    console = Console(file=io.StringIO())
    callback = RichProgressCallback(console)
    state = TrainerState(max_steps=1, is_world_process_zero=False)
    for event in (callback.on_train_begin, callback.on_step_end, callback.on_log, callback.on_train_end):
        event(TrainingArguments(output_dir=str(tmp_path)), state, TrainerControl())
    assert console.file.getvalue() == ""
