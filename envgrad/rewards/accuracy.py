"""Rewards for right answers in mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from envgrad.errors import ConfigurationError
from envgrad.rewards.exchange import answer_text
from envgrad.rewards.math_answers import COMPARER, Comparison, require_math

Completions: TypeAlias = Sequence[str | Sequence[Mapping[str, object]]]
"""Plain texts, or the messages of chats, of which the last answer counts."""

LogExtra: TypeAlias = Callable[[str, list[object]], None]

INCOMPLETE, UNREADABLE = "[incomplete reasoning]", "[unparseable]"


def accuracy_reward(
    completions: Completions, solution: Sequence[str], log_extra: LogExtra | None = None, **kwargs: object
) -> list[float | None]:
    r"""1 where the answer equals the solution mathematically, 0 where not, None where the solution cannot be read.

    Both are read and compared by math-verify. The solution may be LaTeX or a plain number; the answer counts only in
    LaTeX: in a ``\boxed{}``, or behind words such as "the final answer is". One that takes seconds to evaluate is
    wrong.

    Args:
        completions: the sampled answers.
        solution: the right ones, usually the dataset's column ``solution``.
        log_extra: given by the trainer; logs ``solution``, ``gold_parsed`` and ``answer_parsed``.
        kwargs: what else the trainer gives.

    Raises:
        ConfigurationError: math-verify is not installed, or there is not one solution per completion.

    Example:
        >>> accuracy_reward([r"It is \boxed{\frac{1}{3}}.", r"It is \boxed{0.5}."], ["$1/3$", "$1/3$"])
        [1.0, 0.0]
    """
    answers: list[str | None] = [answer_text(completion) for completion in completions]
    return _score("accuracy_reward", answers, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Completions,
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **kwargs: object,
) -> list[float | None]:
    r"""As ``accuracy_reward`` on what follows the reasoning; 0 where the reasoning does not end.

    Args:
        completions: the sampled answers.
        solution: the right ones.
        reasoning_delimiters: what may end the reasoning; the first of these that occurs decides, and the answer
            stands behind its last occurrence. ``("</think>",)`` if None.
        log_extra: given by the trainer.
        kwargs: what else the trainer gives.

    Raises:
        ConfigurationError: as ``accuracy_reward``.

    Example:
        >>> reasoning_accuracy_reward([r"<think>half</think>\boxed{0.5}", r"<think>\boxed{0.5}"], ["$0.5$", "$0.5$"])
        [1.0, 0.0]
    """
    delimiters = ("</think>",) if reasoning_delimiters is None else tuple(reasoning_delimiters)
    answers = [_behind_reasoning(answer_text(completion), delimiters) for completion in completions]
    return _score("reasoning_accuracy_reward", answers, solution, log_extra)


@dataclass(frozen=True, slots=True)
class _CosineScaled:
    """See ``get_cosine_scaled_reward``. An object, so that it can be pickled."""

    max_len: int
    wrong: tuple[float, float]
    """of the shortest and of the longest completion"""
    correct: tuple[float, float]
    __name__ = "cosine_scaled_reward"

    def __call__(
        self,
        completions: Completions,
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: object,
    ) -> list[float | None]:
        accuracies = accuracy_reward(completions, solution)
        return [
            None if accuracy is None else self._scaled(self.correct if accuracy else self.wrong, len(ids))
            for accuracy, ids in zip(accuracies, completion_ids, strict=True)
        ]

    def _scaled(self, bounds: tuple[float, float], length: int) -> float:
        shortest, longest = bounds
        progress = min(length / self.max_len, 1.0)  # beyond max_len the cosine would climb again
        return longest + 0.5 * (shortest - longest) * (1.0 + math.cos(progress * math.pi))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    r"""A reward for right answers, which falls with the completion's length, and a penalty for wrong ones, which
    falls with it too, so that thinking longer is worth a try.

    With the length ``|y|`` in tokens ("Demystifying Long Chain-of-Thought Reasoning", arXiv:2502.03373, C.1)::

        R(y) = r_L + (r_0 - r_L) / 2 * (1 + cos(pi * min(|y| / max_len, 1)))

    where ``r_0, r_L`` (the shortest, the longest) are ``max_value_correct, min_value_correct`` for a right answer and
    ``min_value_wrong, max_value_wrong`` for a wrong one. None where the solution cannot be read.

    Args:
        max_len: tokens at which the reward has arrived at ``r_L``.
        min_value_wrong: of a wrong answer without length.
        max_value_wrong: of a wrong answer of ``max_len`` tokens.
        min_value_correct: of a right answer of ``max_len`` tokens.
        max_value_correct: of a right answer without length.

    Raises:
        ConfigurationError: ``max_len`` below 1, or math-verify is not installed.

    Example:
        >>> reward = get_cosine_scaled_reward(max_len=100)
        >>> reward([r"\boxed{2}", r"\boxed{3}"], ["$2$", "$2$"], completion_ids=[[1] * 50, [1] * 100])
        [0.75, -0.5]
    """
    if max_len < 1:
        raise ConfigurationError(f"max_len={max_len} must be at least 1 token")
    require_math("get_cosine_scaled_reward")
    wrong, correct = (min_value_wrong, max_value_wrong), (max_value_correct, min_value_correct)
    return _CosineScaled(max_len, wrong, correct)


def needs_math(function: object) -> bool:
    """Whether a reward function is one of these, so that math-verify must be there."""
    return function in (accuracy_reward, reasoning_accuracy_reward) or isinstance(function, _CosineScaled)


def _behind_reasoning(text: str, delimiters: Iterable[str]) -> str | None:
    for delimiter in delimiters:
        if delimiter in text:
            return text.rpartition(delimiter)[2]
    return None


def _score(
    name: str, answers: Sequence[str | None], solution: Sequence[str], log_extra: LogExtra | None
) -> list[float | None]:
    """An answer that is None gets 0 without being compared."""
    if len(answers) != len(solution):
        raise ConfigurationError(f"{name} got {len(solution)} solutions for {len(answers)} completions; give one each")
    pairs = [(gold, answer) for gold, answer in zip(solution, answers, strict=True) if answer is not None]
    compared = iter(COMPARER.compare(pairs) if pairs else [])
    comparisons = [None if answer is None else next(compared) for answer in answers]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [_logged_gold(comparison) for comparison in comparisons])
        log_extra("answer_parsed", [_logged_answer(comparison) for comparison in comparisons])
    return [0.0 if c is None else None if c.gold is None else float(c.equal) for c in comparisons]


def _logged_gold(comparison: Comparison | None) -> str:
    if comparison is None:
        return INCOMPLETE
    return UNREADABLE if comparison.gold is None else comparison.gold


def _logged_answer(comparison: Comparison | None) -> str:
    if comparison is None:
        return INCOMPLETE
    if comparison.gold is None:
        return "[skipped]"
    return UNREADABLE if comparison.answer is None else comparison.answer
