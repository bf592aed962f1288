from __future__ import annotations

import pytest

from envgrad import ConfigurationError
from envgrad.environments.tasks import build_task_stream
from envgrad.training.clock import planned_groups, planned_steps
from helpers.models import config


@pytest.mark.parametrize(
    ("changes", "length", "steps", "groups"),
    [
        # 10 tasks, twice, two siblings each: 40 episodes
        ({"num_train_epochs": 2, "per_device_train_batch_size": 6}, 10, 7, 20),
        ({"num_train_epochs": 2, "per_device_train_batch_size": 6, "num_iterations": 3}, 10, 21, 20),
        ({"num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 10, 5, 20),
        # half an epoch of 5 tasks is 2.5 groups, so 3
        ({"num_train_epochs": 0.5, "per_device_train_batch_size": 2}, 5, 3, 3),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 64}, 1, 1, 1),
        ({"max_steps": 9}, 10, 9, None),
        ({"max_steps": 9}, None, 9, None),
    ],
)
def test_steps_and_groups_of_a_run(tmp_path, changes, length, steps, groups):
    given = config(tmp_path, **({"max_steps": -1, "num_generations": 2} | changes))
    assert (planned_steps(given, length), planned_groups(given, length)) == (steps, groups)


def test_a_group_of_another_size_counts_as_one_of_the_usual_size(tmp_path):
    given = config(tmp_path, max_steps=-1, num_train_epochs=1, num_generations=2, per_device_train_batch_size=4,
                   environment_options={"a": {"num_generations": 6}})  # fmt: skip
    assert planned_steps(given, 10) == 5


def test_a_stream_needs_max_steps(tmp_path):
    stream = build_task_stream({}, seed=0, split="train", dataset=iter([{"prompt": "?"}]))
    with pytest.raises(ConfigurationError, match=r"no known end .*streaming dataset.*set max_steps > 0"):
        planned_steps(config(tmp_path, max_steps=-1), stream.epoch_length)
