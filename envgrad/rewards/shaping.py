"""Rewards for format, length and repetition: they shape how an answer is given, not whether it is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envgrad.errors import ConfigurationError
from envgrad.rewards.accuracy import Completions
from envgrad.rewards.exchange import answer_text

_THINK = re.compile(r"<think>(?!.*<think>).*?</think>.*", re.DOTALL)


def think_format_reward(completions: Completions, **kwargs: object) -> list[float]:
    """1 where the last answer is one reasoning block between think tags and an answer behind it, else 0.

    The text must begin with ``<think>``, hold no second ``<think>``, and close it.

    Args:
        completions: plain texts, or messages.
        kwargs: what else the trainer gives.

    Example:
        >>> think_format_reward(["<think>1+1</think>2", "1+1 is 2", [{"role": "assistant", "content": "<think>2"}]])
        [1.0, 0.0, 0.0]
    """
    return [float(_THINK.match(answer_text(completion)) is not None) for completion in completions]


@dataclass(frozen=True, slots=True)
class _RepetitionPenalty:
    """See ``get_repetition_penalty_reward``. An object, so that it can be pickled."""

    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        total = len(ids) - self.ngram_size + 1
        if total < 1:
            return 0.0
        unique = len({tuple(ids[start : start + self.ngram_size]) for start in range(total)})
        return (1 - unique / total) * self.max_penalty if unique < total else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """A penalty for repeated n-grams of tokens: their share of all n-grams, times ``max_penalty``.

    ::

        R(y) = (1 - unique n-grams / all n-grams) * max_penalty

    ("Demystifying Long Chain-of-Thought Reasoning", arXiv:2502.03373, C.2.) 0 for fewer than ``ngram_size`` tokens.

    Args:
        ngram_size: tokens of an n-gram.
        max_penalty: what endless repetition comes close to; at most 0.

    Raises:
        ConfigurationError: ``ngram_size`` below 1, or a positive ``max_penalty``.

    Example:
        >>> get_repetition_penalty_reward(ngram_size=2)(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]])
        [0.0, -0.75]
    """
    if ngram_size < 1:
        raise ConfigurationError(f"ngram_size={ngram_size} must be at least 1 token")
    if not max_penalty <= 0:
        raise ConfigurationError(f"max_penalty={max_penalty} must be at most 0: it is added to the rewards")
    return _RepetitionPenalty(ngram_size, max_penalty)


@dataclass(frozen=True, slots=True)
class _SoftOverlongPunishment:
    """See ``get_soft_overlong_punishment``. An object, so that it can be pickled."""

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: object) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return -1.0 if length > self.max_completion_len else (free - length) / self.soft_punish_cache


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """A penalty that grows linearly over the last tokens before the limit, and is -1 beyond it.

    With the length ``|y|`` in tokens (DAPO, arXiv:2503.14476, eq. 13)::

        R(y) = 0                                                        |y| <= max - cache
               ((max - cache) - |y|) / cache              max - cache < |y| <= max
               -1                                               max   < |y|

    Args:
        max_completion_len: the limit in tokens.
        soft_punish_cache: how many tokens before it the penalty begins; 0: only beyond the limit.

    Raises:
        ConfigurationError: a limit below 1, or a ``soft_punish_cache`` that is not between 0 and the limit.

    Example:
        >>> get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(completion_ids=[[1] * 90])
        [-0.5]
    """
    if max_completion_len < 1 or not 0 <= soft_punish_cache <= max_completion_len:
        raise ConfigurationError(
            f"soft_punish_cache={soft_punish_cache} must lie between 0 and max_completion_len={max_completion_len}, "
            "which must be at least 1"
        )
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)
