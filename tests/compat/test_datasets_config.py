from __future__ import annotations

import json

import pytest

from envgrad import ConfigurationError, DatasetMixtureConfig, get_dataset


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """Makes a dataset of ``count`` rows as a file, and its entry in a mixture."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def make(name, count, **more):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{name}{i}", "n": i}) + "\n" for i in range(count)))
        return {"path": "json", "data_files": str(path)} | more

    return make


def test_datasets_come_one_after_another_with_the_columns_asked_for(entry):
    mixture = DatasetMixtureConfig(datasets=[entry("a", 2, columns=["prompt"]), entry("b", 1, columns=["prompt"])])
    found = get_dataset(mixture)
    assert list(found) == ["train"] and found["train"].column_names == ["prompt"]
    assert found["train"]["prompt"][:] == ["a0", "a1", "b0"]


def test_shares_take_no_row_twice(entry):
    found = get_dataset(DatasetMixtureConfig(datasets=[entry("a", 9, fraction=1.0), entry("b", 2, fraction=0.5)]))
    # shares 2/3 and 1/3: N = min(9 / (2/3), 2 / (1/3)) = 6, so 4 and 2 rows
    assert found["train"]["prompt"][:] == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_a_part_is_kept_for_evaluation(entry):
    found = get_dataset(DatasetMixtureConfig(datasets=[entry("a", 10)], test_split_size=0.2))
    assert (len(found["train"]), len(found["test"])) == (8, 2)


def test_streams_are_streamed(entry):
    found = get_dataset(DatasetMixtureConfig(datasets=[entry("a", 2)], streaming=True))["train"]
    assert not hasattr(found, "__len__") and [row["n"] for row in found] == [0, 1]


@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        (({"fraction": 0.5}, {}), {}, "for some datasets only"),
        (({"fraction": 0.5}, {"fraction": 0.5}), {"streaming": True}, "streaming does not know"),
        (({"fraction": 0.0}, {"fraction": 0.0}), {}, "shares of at least 0"),
        (({}, {}), {"streaming": True, "test_split_size": 0.5}, "cannot split streamed"),
    ],
)
def test_mixtures_that_cannot_be_are_errors(entry, more, changes, words):
    first, second = more
    mixture = DatasetMixtureConfig(datasets=[entry("a", 2, **first), entry("b", 2, **second)], **changes)
    with pytest.raises(ConfigurationError, match=words):
        get_dataset(mixture)


def test_entries_are_checked():
    with pytest.raises(ConfigurationError, match="datasets is empty"):
        get_dataset(DatasetMixtureConfig())
    for wrong in ({"name": "x"}, {"path": "x", "parts": 2}, "x"):
        with pytest.raises(ConfigurationError, match="must be a mapping with a path"):
            DatasetMixtureConfig(datasets=[wrong])
