"""The record of every episode that a run has played: a writer, a reader, and the replay of one episode.

::

    run/episodes/index.sqlite          a line per episode, their words, the steps' metrics; the latest episodes whole
    run/episodes/part-000000.parquet   whole episodes: messages, tokens, calls; about 500 of them, or 4 MB
    run/episodes/resumes.jsonl         where trainings began, so that what a resume left behind can be told
    run/episodes/run.json              what a replay needs: how environments are made, limits, isolation
    run/episodes/tokenizer.json        the run's tokenizer, if it is a fast one

``log`` writes in a thread of its own: ``flat`` makes rows of a round, ``index`` and ``parts`` keep them, and ``whole``
makes records of rows. ``reader`` reads, also while the run writes; ``queries`` are its filters. ``replay`` plays an
episode again: ``factories`` makes its environment, ``recorded`` answers in the model's place, ``compare`` finds the
first difference.
"""

from envgrad.episodes.export import export_jsonl
from envgrad.episodes.reader import EpisodeReader
from envgrad.episodes.records import (
    CallRecord,
    EpisodeFilter,
    EpisodeRecord,
    EpisodeSummary,
    News,
    Preview,
    StepSummary,
    TokenRecord,
    TurnRecord,
    Use,
)

__all__ = [
    "CallRecord",
    "EpisodeFilter",
    "EpisodeReader",
    "EpisodeRecord",
    "EpisodeSummary",
    "News",
    "Preview",
    "StepSummary",
    "TokenRecord",
    "TurnRecord",
    "Use",
    "export_jsonl",
]
