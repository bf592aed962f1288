"""Tasks of Harbor from a Python that cannot have harbor: in another interpreter, checked, evaluated and trained on.

``ENVGRAD_ECOSYSTEM_PYTHON`` names that interpreter: Python 3.12 or newer with harbor and transformers.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envgrad import GRPOConfig, GRPOTrainer, check_environment
from envgrad.environments.adapters import OtherPython
from envgrad.environments.sandbox import unavailable
from envgrad.errors import ConfigurationError
from helpers.harbor_tasks import DOCKERFILE, write_task, write_tasks

PYTHON = os.environ.get("ENVGRAD_ECOSYSTEM_PYTHON", "")

pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason="ENVGRAD_ECOSYSTEM_PYTHON names no interpreter"),
    pytest.mark.skipif(unavailable() is not None, reason=f"no sandbox here: {unavailable()}"),
]


def harbor(tasks: Path, temporary: Path | None = None, **arguments: object) -> OtherPython:
    target = "envgrad.environments.adapters.harbor:HarborEnvironment"
    variables = None if temporary is None else {"TMPDIR": str(temporary)}
    return OtherPython(PYTHON, target, {"tasks": str(tasks)} | arguments, variables=variables)


@pytest.fixture
def temporary():
    """Where trials lie, apart from those of tests that run beside; the sandboxes' own users must get there."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_five_steps_and_an_evaluation(tmp_path, temporary):
    tasks = harbor(write_tasks(tmp_path / "tasks", 4), temporary, eval_tasks=str(write_tasks(tmp_path / "held", 2)))
    config = GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=5, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=96, max_turn_tokens=12, max_turns=2, report_to="none", use_cpu=True, logging_steps=1,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer("starter", args=config, environment_factory=tasks)
    trainer.train()
    metrics = trainer.evaluate()
    assert trainer.state.global_step == 5 and math.isfinite(metrics["eval_reward"])
    records = list(trainer.episode_log.read())
    played = [record for record in records if record["split"] == "train"]
    assert len(played) == 20 and {record["reward"] for record in played} <= {0.0, 1.0}
    assert not list(temporary.glob("envgrad-harbor-*"))
    tasks.close()


def test_the_check_finds_nothing_wrong(tmp_path):
    tasks = harbor(write_tasks(tmp_path, 4), tool_seconds=5)
    report = check_environment(tasks, groups=1, turns=2)
    assert report.ok, str(report)
    tasks.close()


def test_what_cannot_be_played_is_told_here(tmp_path):
    task = write_task(tmp_path, dockerfile=DOCKERFILE + "RUN make\n")
    with pytest.raises(ConfigurationError, match="refuses 'RUN make'"):
        harbor(task)()
