"""From filters to SQL: values always as parameters, never as text of the statement."""

from __future__ import annotations

import re

from envgrad.episodes.records import EpisodeFilter, Order
from envgrad.errors import ConfigurationError

_ORDERS: dict[Order, str] = {
    "newest": "number DESC",
    "oldest": "number",
    "reward": "reward IS NULL, reward, number",
    "-reward": "reward IS NULL, reward DESC, number DESC",
    "advantage": "advantage IS NULL, advantage, number",
    "-advantage": "advantage IS NULL, advantage DESC, number DESC",
    "tokens": "sampled_tokens, number",
    "-tokens": "sampled_tokens DESC, number DESC",
}
_CONDITIONS = {
    "split": "split = ?",
    "environment": "environment = ?",
    "first_step": "step >= ?",
    "last_step": "step <= ?",
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "stop_reason": "stop_reason = ?",
    "use": "use = ?",
    "truncated": "truncated = ?",
    "group": '"group" = ?',
    "task_index": "task_index = ?",
    "part": "part = ?",
    "current": "current = ?",
}


def order_clause(order: Order) -> str:
    """
    >>> order_clause("-reward")
    'reward IS NULL, reward DESC, number DESC'

    Raises:
        ConfigurationError: no such order.
    """
    if order not in _ORDERS:
        raise ConfigurationError(f"order={order!r} must be one of {', '.join(_ORDERS)}")
    return _ORDERS[order]


def where_clause(filter: EpisodeFilter) -> tuple[str, list[object]]:
    """A condition, and the values of its marks.

    >>> where_clause(EpisodeFilter(environment="chess", failed=True, current=None))
    ('environment = ? AND failed IS NOT NULL', ['chess'])
    """
    parts: list[str] = []
    values: list[object] = []
    for name, condition in _CONDITIONS.items():
        value: object = getattr(filter, name)
        if value is not None:
            parts.append(condition)
            values.append(int(value) if isinstance(value, bool) else str(value) if isinstance(value, str) else value)
    if filter.failed is not None:
        parts.append("failed IS NOT NULL" if filter.failed else "failed IS NULL")
    words = None if filter.text is None else match_words(filter.text)
    if words is not None:
        parts.append("number IN (SELECT rowid FROM words WHERE words MATCH ?)")
        values.append(words)
    return " AND ".join(parts) or "1", values


def match_words(text: str) -> str | None:
    """What a person types, as a full-text query in which nothing but words and phrases has a meaning.

    None if there is no word in it.

    >>> match_words('won "the game" quick')
    '"won" "the game" "quick"*'
    >>> match_words('a" OR (b'), match_words("?!") is None
    ('"a" "OR" "b"*', True)
    """
    found: list[str] = []
    for phrase, rest in re.findall(r'"([^"]*)"|([^"]+)', text):
        words = [phrase] if phrase else rest.split()
        # A word without letter or digit is none for the tokenizer, which takes no empty phrase.
        found += ['"' + re.sub(r"[^\w]+", " ", word).strip() + '"' for word in words if re.search(r"[^\W_]", word)]
    if not found:
        return None
    whole = text.rstrip().endswith('"') and text.count('"') % 2 == 0
    return " ".join(found) if whole else " ".join(found) + "*"
