from __future__ import annotations

import pytest

from envgrad.episodes import EpisodeFilter, Use
from envgrad.errors import ConfigurationError
from envgrad.viewer.query import episode_filter, number, order


def test_an_address_without_conditions_is_the_filter_that_lets_all_of_the_lineage_through() -> None:
    assert episode_filter({}) == EpisodeFilter()
    assert episode_filter(dict.fromkeys(("min", "text", "failed", "stop", "lineage"), "")) == EpisodeFilter()


def test_every_condition_of_the_address_reaches_the_filter() -> None:
    asked = {"split": "eval", "environment": "chess", "first": "2", "last": "9", "min": "-0.5", "max": "1e3"}
    asked |= {"stop": "done", "use": "filtered", "failed": "false", "task": "7", "text": 'a "b c"', "lineage": "both"}
    assert episode_filter(asked) == EpisodeFilter(
        split="eval", environment="chess", first_step=2, last_step=9, min_reward=-0.5, max_reward=1000.0,
        stop_reason="done", use=Use.FILTERED, failed=False, task_index=7, text='a "b c"', current=None,
    )  # fmt: skip
    assert episode_filter({"part": "agent"}).part == "" and episode_filter({"part": "rival"}).part == "rival"
    assert episode_filter({"failed": "true", "lineage": "old"}) == EpisodeFilter(failed=True, current=False)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"min": "x"}, "min='x' must be a number"),
        ({"max": "nan"}, "max='nan' must be a number"),
        ({"first": "-1"}, "first='-1' must be a whole number from 0"),
        ({"last": "1.5"}, "last='1.5' must be a whole number"),
        ({"use": "eaten"}, "use='eaten' is none of trained"),
        ({"failed": "maybe"}, "failed='maybe' is none of true, false"),
        ({"min": "2", "max": "1"}, "min_reward"),
    ],
)
def test_what_cannot_be_read_is_named(asked: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(")):
        episode_filter(asked)


def test_a_number_that_must_be_there() -> None:
    assert number({}, "offset", 0, least=0) == 0
    with pytest.raises(ConfigurationError, match="n='' must be a whole number from 0"):
        number({}, "n", least=0)
    with pytest.raises(ConfigurationError, match="limit='501' must be a whole number from 0 to 500"):
        number({"limit": "501"}, "limit", 50, least=0, most=500)


def test_orders_are_the_reader_s() -> None:
    assert order({}) == "newest" and order({"order": "-reward"}) == "-reward"
    with pytest.raises(ConfigurationError, match="order='up' is none of newest"):
        order({"order": "up"})
