"""100,000 episodes: filters, searches and openings keep their bounds, on a page cache that may be cold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envgrad.episodes import EpisodeFilter, EpisodeReader
from helpers.episode_runs import make_run

pytestmark = pytest.mark.skipif(os.environ.get("ENVGRAD_LONG") != "1", reason="part of make test-long")

EPISODES = 100_000

_COLD = """
import sys, time
from envgrad.episodes import EpisodeFilter, EpisodeReader
began = time.perf_counter()
reader = EpisodeReader(sys.argv[1])
found = reader.rows(EpisodeFilter(text="harbour tower"))
print(time.perf_counter() - began if found else "nothing found")
"""


@pytest.mark.timeout(1200)
def test_a_hundred_thousand_episodes(tmp_path: Path) -> None:
    make_run(tmp_path, episodes=EPISODES, round_episodes=256)
    done = subprocess.run([sys.executable, "-c", _COLD, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0
    with EpisodeReader(tmp_path) as reader:
        filters = [
            EpisodeFilter(),
            EpisodeFilter(environment="chess", min_reward=1.0),
            EpisodeFilter(stop_reason="max_turns", first_step=100, last_step=300),
            EpisodeFilter(failed=True),
            EpisodeFilter(truncated=True, split="train", max_reward=0.5),
        ]
        for chosen in filters:
            for order in ("newest", "-reward"):
                began = time.perf_counter()
                rows, count = reader.rows(chosen, order=order), reader.count(chosen)  # type: ignore[arg-type]
                assert time.perf_counter() - began < 0.3 and rows and count >= len(rows), chosen
        for text in ("you", "harbour", '"find the harbour"', "tow"):
            began = time.perf_counter()
            assert reader.rows(EpisodeFilter(text=text)) and reader.count(EpisodeFilter(text=text))
            assert time.perf_counter() - began < 1.0, text
        reader.episode(0)  # the first one imports pyarrow
        for number in (12, 50_000, 99_999):
            began = time.perf_counter()
            assert reader.episode(number).summary.number == number
            assert time.perf_counter() - began < 0.2
        began = time.perf_counter()
        assert len(reader.steps()) > 300 and time.perf_counter() - began < 0.3
