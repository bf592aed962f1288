"""Rows of parts as records: the way back from ``flat``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envgrad.episodes.flat import TEXT_LIMIT, search_texts
from envgrad.episodes.parts import FlatRow
from envgrad.episodes.records import CallRecord, EpisodeRecord, EpisodeSummary, TokenRecord, TurnRecord, Use
from envgrad.types import Message


def words_of(flat: FlatRow) -> tuple[str, str, str]:
    """``search_texts`` of a row that was read from a part."""
    if flat["failed"] is not None:
        return "", "", flat["error"][:TEXT_LIMIT]
    body = json.loads(flat["body"])
    return search_texts(body["messages"], body["opening"])


def read_record(flat: FlatRow, summary: EpisodeSummary) -> EpisodeRecord:
    """A part's row as a record."""
    body = json.loads(flat["body"])
    messages = tuple(body["messages"])
    return EpisodeRecord(
        summary=summary,
        messages=messages,
        opening=body["opening"],
        tools=tuple(json.loads(flat["tools"])),
        plain_prompt=body["plain_prompt"],
        turns=tuple(_read_turn(turn, messages) for turn in body["turns"]),
        rows=tuple(_token_rows(flat)),
        seconds=body["seconds"],
        extras=body["extras"],
        feedback=body["feedback"],
        error=flat["error"],
        epoch=flat["epoch"],
        row=None if flat["row"] is None else json.loads(flat["row"]),
        row_is_exact=flat["row_is_exact"],
        start=flat["start"],
    )


def _read_turn(turn: Mapping[str, Any], messages: Sequence[Message]) -> TurnRecord:
    message = turn["message"]
    return TurnRecord(
        **{
            **turn,
            "message": messages[message] if isinstance(message, int) else message,
            "calls": tuple(CallRecord(**call) for call in turn["calls"]),
        }
    )


def _token_rows(flat: FlatRow) -> Iterator[TokenRecord]:
    at = 0
    for length, prompt_length in zip(flat["row_lengths"], flat["prompt_lengths"], strict=True):
        cut = slice(at, at + length)
        at += length
        optional = {
            name: None if flat[name] is None else tuple(flat[name][cut]) for name in ("advantages", "trainer_logprobs")
        }
        yield TokenRecord(
            token_ids=tuple(flat["token_ids"][cut]),
            mask=tuple(flat["mask"][cut]),
            logprobs=tuple(flat["logprobs"][cut]),
            versions=tuple(flat["versions"][cut]),
            prompt_length=prompt_length,
            **optional,
        )


def plain_record(record: EpisodeRecord) -> dict[str, Any]:
    """An episode as plain data, for JSON lines and data sets: the columns of the log, tokens of the main row first."""
    summary = record.summary
    rows = [
        {
            "prompt_length": row.prompt_length,
            "token_ids": list(row.token_ids),
            "mask": list(row.mask),
            "logprobs": [round(value, 6) for value in row.logprobs],
            "versions": list(row.versions),
            "advantages": None if row.advantages is None else [round(value, 6) for value in row.advantages],
        }
        for row in record.rows
    ]
    empty = {"prompt_length": 0, "token_ids": [], "mask": [], "logprobs": [], "versions": [], "advantages": None}
    names = (
        "number",
        "group",
        "step",
        "split",
        "environment",
        "position",
        "task_index",
        "group_id",
        "seed",
        "sibling",
        "part",
    )
    more = ("attempt", "reward", "advantage", "stop_reason", "failed", "truncated", "turns")
    return {
        **{name: getattr(summary, name) for name in names + more},
        "use": str(summary.use),
        "filtered": summary.use is Use.FILTERED,
        "rewards": dict(summary.rewards),
        "error": record.error,
        "extras": dict(record.extras),
        "messages": list(record.messages),
        "opening": record.opening,
        "feedback": record.feedback,
        **(rows[0] if rows else empty),
        "branches": rows[1:],
        "seconds": dict(record.seconds),
    }
