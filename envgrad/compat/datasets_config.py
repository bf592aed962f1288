"""``ScriptArguments``, ``DatasetMixtureConfig``, ``get_dataset``: which data a script trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset


@dataclass
class ScriptArguments:
    """What training scripts ask on their command line beside model and configuration.

    Example:
        >>> ScriptArguments(dataset_name="my/data").dataset_train_split
        'train'
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Name or path of the dataset."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    dataset_streaming: bool = field(default=False, metadata={"help": "Stream the dataset."})
    ignore_bias_buffers: bool = field(
        default=False, metadata={"help": "For scripts that train in several processes: leave bool buffers alone."}
    )


@dataclass
class DatasetConfig:
    """One dataset of a mixture; the fields are arguments of ``datasets.load_dataset``, but for the last two."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    """columns to keep; all by default"""
    fraction: float | None = None
    """share of the mixture; by default datasets are taken whole"""


@dataclass
class DatasetMixtureConfig:
    """Several datasets, one after another.

    Raises:
        ConfigurationError: an entry that is no ``DatasetConfig`` and cannot be read as one.

    Example:
        >>> DatasetMixtureConfig(datasets=[{"path": "my/data"}]).datasets[0].split
        'train'
    """

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "Datasets of the mixture, in a YAML file: mappings with a path."}
    )
    streaming: bool = field(default=False, metadata={"help": "Stream the datasets."})
    test_split_size: float | None = field(default=None, metadata={"help": "Share of rows kept for evaluation."})

    def __post_init__(self) -> None:
        self.datasets = [_dataset_config(entry) for entry in self.datasets]


def _dataset_config(entry: object) -> DatasetConfig:
    if isinstance(entry, DatasetConfig):
        return entry
    known = {f.name for f in fields(DatasetConfig)}
    if not isinstance(entry, dict) or "path" not in entry or set(entry) - known:
        raise ConfigurationError(
            f"datasets has {entry!r}; an entry must be a mapping with a path, and of {', '.join(sorted(known))}"
        )
    return DatasetConfig(**entry)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """Load the mixture: a ``DatasetDict`` with ``train``, and ``test`` if ``test_split_size`` is set.

    With ``fraction``, shares are normalised and the mixture is as large as it can be without a row taken twice: of
    dataset i the first ``round(share_i * N)`` rows, with ``N = min(len_i / share_i)``.

    Raises:
        ConfigurationError: no dataset, a share for some of them only, or shares of streamed datasets.
    """
    import datasets

    if not mixture_config.datasets:
        raise ConfigurationError("datasets is empty: name at least one dataset, by its path")
    parts: list[Any] = []
    for entry in mixture_config.datasets:
        part = datasets.load_dataset(
            entry.path,
            name=entry.name,
            data_dir=entry.data_dir,
            data_files=entry.data_files,
            split=entry.split,
            streaming=mixture_config.streaming,
        )
        parts.append(part if entry.columns is None else part.select_columns(entry.columns))
    combined = datasets.concatenate_datasets(_take_shares(parts, mixture_config))
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": combined})
    if mixture_config.streaming:
        raise ConfigurationError("test_split_size cannot split streamed datasets; name an evaluation dataset instead")
    return combined.train_test_split(test_size=mixture_config.test_split_size)


def _take_shares(
    parts: Sequence[Dataset | IterableDataset], mixture: DatasetMixtureConfig
) -> Sequence[Dataset | IterableDataset]:
    fractions = [entry.fraction for entry in mixture.datasets if entry.fraction is not None]
    if not fractions:
        return parts
    if len(fractions) != len(parts):
        raise ConfigurationError("fraction is set for some datasets only; set it for all of them, or for none")
    if mixture.streaming:
        raise ConfigurationError("fraction needs the datasets' lengths, which streaming does not know; set neither")
    if min(fractions) < 0 or not sum(fractions):
        raise ConfigurationError(f"fraction={fractions} must be shares of at least 0, one of them above it")
    shares = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True) if share)
    return [part.select(range(round(share * total))) for part, share in zip(parts, shares, strict=True)]
