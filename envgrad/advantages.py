"""Rewards of a group -> advantages. Pure functions over plain floats.

Rewards come as groups (one inner sequence per task, one value per sibling); advantages come back in the same shape::

    [[1.0, 0.0, None], [0.5, 0.5, 0.5]]  ->  [[0.707, -0.707, 0.0], [0.0, 0.0, 0.0]]

``None`` and NaN mean *unscorable*: such a sibling is in no mean and no standard deviation, and its advantage is 0. A
group with fewer than two scored siblings, or with equal rewards, has nothing to compare: its advantages are exactly 0
(not rounding dust, which dividing by a tiny deviation would blow up).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias, get_args

from envgrad.errors import ConfigurationError

Rewards: TypeAlias = Sequence[float | None]
"""One group's rewards in sibling order; None or NaN where unscorable."""

ScaleRewards: TypeAlias = Literal["group", "batch", "none"]


Baseline: TypeAlias = Literal["group", "batch"]


def grpo_advantages(
    groups: Sequence[Rewards],
    scale_rewards: ScaleRewards = "group",
    eps: float = 1e-4,
    baseline: Baseline = "group",
) -> list[list[float]]:
    """Group-relative advantages: ``A_i = (r_i - mean(r)) / (s + eps)``.

    ``mean`` is over the group's scored siblings. ``s`` is, by ``scale_rewards``:

    - ``"group"``: the standard deviation of the group's scored rewards (GRPO, arXiv:2402.03300, section 4.1);
    - ``"batch"``: the standard deviation of all scored rewards of all groups;
    - ``"none"``: no division, ``A_i = r_i - mean(r)`` (Dr. GRPO, arXiv:2503.20783: dividing by the group's deviation
      weighs questions that are too easy or too hard more than others).

    Standard deviations are the unbiased ones (divisor ``n - 1``).

    ``baseline="batch"`` takes all scored rewards of all groups for one group: for siblings that do not share a task, so
    that the mean of the few is no better a guess than the mean of all (REINFORCE with a batch mean).

    Degenerate cases: unscorable sibling, fewer than two scored siblings, equal rewards -> 0.

    Raises:
        ConfigurationError: an unknown ``scale_rewards`` or ``baseline``, a deviation of the group beside a mean of the
            batch, a negative ``eps``, or an infinite reward.

    Example:
        >>> grpo_advantages([[1.0, None, 0.0, 2.0]], "none")
        [[0.0, 0.0, -1.0, 1.0]]
        >>> grpo_advantages([[1.0, 1.0], [0.0, 2.0, None]], "none", baseline="batch")
        [[0.0, 0.0], [-1.0, 1.0, 0.0]]
        >>> [round(a, 3) for a in grpo_advantages([[0.0, 0.0, 1.0, 1.0]])[0]]
        [-0.866, -0.866, 0.866, 0.866]
    """
    if scale_rewards not in get_args(ScaleRewards):
        raise ConfigurationError(
            f"scale_rewards={scale_rewards!r} is not known; use one of {', '.join(map(repr, get_args(ScaleRewards)))}"
        )
    _check_eps(eps)
    _check_finite(groups)
    if _is_batch(baseline):
        if scale_rewards == "group":
            raise ConfigurationError(
                "scale_rewards='group' cannot act beside baseline='batch': a group's deviation says nothing of the "
                "batch's mean; set scale_rewards to 'batch' or 'none'"
            )
        return _as_one(groups, lambda pool: grpo_advantages(pool, scale_rewards, eps))
    batch_std = _std(_scored(reward for group in groups for reward in group)) if scale_rewards == "batch" else 0.0

    def advantages(scored: list[float]) -> list[float]:
        mean = _mean(scored)
        if scale_rewards == "none":
            return [reward - mean for reward in scored]
        divisor = (batch_std if scale_rewards == "batch" else _std(scored)) + eps
        # a deviation can round to 0 between rewards that differ in their last bits
        return [(reward - mean) / divisor if divisor > 0.0 else 0.0 for reward in scored]

    return [_credit(group, advantages) for group in groups]


def rloo_advantages(
    groups: Sequence[Rewards], normalize: bool = False, eps: float = 1e-4, baseline: Baseline = "group"
) -> list[list[float]]:
    """Leave-one-out advantages: ``A_i = r_i - sum_{j != i} r_j / (n - 1)`` over the group's ``n`` scored siblings.

    REINFORCE with the mean reward of the *other* samples as baseline, which is independent of sample ``i`` and so
    leaves the gradient unbiased (RLOO, arXiv:2402.14740, equation 8). It equals ``n / (n - 1) * (r_i - mean(r))``.

    ``normalize=True`` then standardises over the whole batch: ``(A - mean(A)) / (std(A) + eps)`` over every scored
    sibling of every group with at least two scored ones, with the unbiased deviation.

    ``baseline="batch"`` leaves one out of all scored rewards of all groups, for siblings that do not share a task.

    Degenerate cases: unscorable sibling, fewer than two scored siblings, equal rewards -> 0.

    Raises:
        ConfigurationError: an unknown ``baseline``, a negative ``eps`` or an infinite reward.

    Example:
        >>> rloo_advantages([[1.0, 0.0, 2.0], [3.0, None, 1.0]])
        [[0.0, -1.5, 1.5], [2.0, 0.0, -2.0]]
        >>> rloo_advantages([[3.0, 3.0], [0.0]], baseline="batch")
        [[1.5, 1.5], [-3.0]]
    """
    _check_eps(eps)
    _check_finite(groups)
    if _is_batch(baseline):
        return _as_one(groups, lambda pool: rloo_advantages(pool, normalize, eps))

    def leave_one_out(scored: list[float]) -> list[float]:
        total = math.fsum(scored)
        return [reward - (total - reward) / (len(scored) - 1) for reward in scored]

    advantages = [_credit(group, leave_one_out) for group in groups]
    return _standardise(advantages, groups, eps) if normalize else advantages


def gdpo_advantages(
    groups: Sequence[Sequence[Rewards]], weights: Sequence[float], eps: float = 1e-4
) -> list[list[float]]:
    """Normalise each reward component inside its group, sum with ``weights``, then standardise over the batch.

    ``groups[g][k]`` holds component ``k`` of group ``g``, one value per sibling. With ``z_ik`` the GRPO advantage of
    component ``k`` alone, ``s_i = sum_k w_k z_ik`` and ``A_i = (s_i - mean(s)) / (std(s) + eps)`` over all scored
    siblings of the batch (GDPO, arXiv:2601.05242): a component with a small spread is not drowned by one with a large
    spread, and different combinations of components do not collapse into one advantage.

    Degenerate cases: a component that is unscorable for a sibling, or that nobody else of its group has, adds 0 to
    it; a sibling without any scored component, a group with fewer than two scored siblings, equal sums -> 0.

    Raises:
        ConfigurationError: a group whose number of components is not ``len(weights)``, components of unequal lengths,
            a negative ``eps``, or an infinite reward.

    Example:
        >>> [round(a, 3) for a in gdpo_advantages([[[1.0, 0.0], [0.0, 100.0]]], weights=[2.0, 1.0])[0]]
        [0.707, -0.707]
    """
    _check_eps(eps)
    sums: list[list[float]] = []
    scored: list[list[float | None]] = []
    for number, components in enumerate(groups):
        if len(components) != len(weights):
            raise ConfigurationError(
                f"group {number} has {len(components)} reward components, but there are {len(weights)} weights; "
                "give one weight per component"
            )
        lengths = {len(component) for component in components}
        if len(lengths) > 1:
            raise ConfigurationError(
                f"group {number} has components with {sorted(lengths)} rewards; each needs one reward per sibling"
            )
        parts = grpo_advantages(components, "group", eps)
        total = [
            math.fsum(weight * part for weight, part in zip(weights, sibling, strict=True))
            for sibling in zip(*parts, strict=True)
        ]
        has_reward = [bool(_scored(sibling)) for sibling in zip(*components, strict=True)]
        sums.append([value if has else 0.0 for value, has in zip(total, has_reward, strict=True)])
        scored.append([value if has else None for value, has in zip(total, has_reward, strict=True)])
    return _standardise(sums, scored, eps)


def turn_returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Discounted returns from each turn on: ``G_t = r_t + discount * G_{t+1}``.

    Example:
        >>> turn_returns([0.0, 1.0, 2.0], discount=0.5)
        [1.0, 2.0, 2.0]
    """
    returns = [0.0] * len(rewards)
    following = 0.0
    for index in reversed(range(len(rewards))):
        following = returns[index] = rewards[index] + discount * following
    return returns


def turn_advantages(
    groups: Sequence[Sequence[Sequence[float] | None]],
    discount: float = 1.0,
    scale_rewards: ScaleRewards = "group",
    eps: float = 1e-4,
) -> list[list[list[float]]]:
    """Per-turn advantages: returns from each turn on, compared with the siblings' at the same turn.

    ``groups[g][i]`` holds sibling ``i``'s reward of each of its turns (None: unscorable). With its returns
    ``G_it = sum_{k >= t} discount^(k - t) * r_ik``::

        A_it = (G_it - mean over siblings j that have a turn t of G_jt) / (s_t + eps)

    ``s_t`` is, by ``scale_rewards``, the deviation of those siblings' returns at turn t, that of all returns of all
    groups, or absent. With one turn each, and with rewards on the last of equally many turns at ``discount`` 1, this is
    ``grpo_advantages``. Turn-level credit of this kind: arXiv:2505.11821.

    **Bias.** At turn 0 all siblings stand before one state, and the baseline is a fair one. Later they stand before
    different histories: the mean over siblings at turn t is not the value of the state that a sibling is in, and who
    still has a turn t depends on what was done before. The baseline is then a heuristic: it credits a turn for being
    in a better place than the siblings were. GiGPO (arXiv:2505.10978) compares only turns that begin in equal states.

    Degenerate cases: an unscorable sibling, a turn that no other scored sibling has, equal returns -> 0.

    Raises:
        ConfigurationError: ``discount`` outside [0, 1], an unknown ``scale_rewards``, a negative ``eps``, or an
            infinite reward.

    Example:
        >>> turn_advantages([[[1.0, 0.0], [0.0, 2.0, 0.0], None]], scale_rewards="none")
        [[[-0.5, -1.0], [0.5, 1.0, 0.0], []]]
    """
    if not 0.0 <= discount <= 1.0:
        raise ConfigurationError(f"discount={discount!r} must be in [0, 1]; 1 counts all later rewards fully")
    returns = [[None if turns is None else turn_returns(turns, discount) for turns in group] for group in groups]
    rows: list[list[float | None]] = []
    for group in returns:
        length = max((len(turns) for turns in group if turns is not None), default=0)
        rows.extend(
            [None if turns is None or at >= len(turns) else turns[at] for turns in group] for at in range(length)
        )
    of_rows = iter(grpo_advantages(rows, scale_rewards, eps))
    result: list[list[list[float]]] = []
    for group in returns:
        length = max((len(turns) for turns in group if turns is not None), default=0)
        columns = [next(of_rows) for _ in range(length)]
        result.append(
            [[columns[at][i] for at in range(0 if turns is None else len(turns))] for i, turns in enumerate(group)]
        )
    return result


def _is_batch(baseline: Baseline) -> bool:
    if baseline not in get_args(Baseline):
        raise ConfigurationError(
            f"baseline={baseline!r} is not known; use one of {', '.join(map(repr, get_args(Baseline)))}"
        )
    return baseline == "batch"


def _as_one(
    groups: Sequence[Rewards], advantages: Callable[[Sequence[Rewards]], list[list[float]]]
) -> list[list[float]]:
    """The advantages of all groups' rewards as those of one group, in the groups' shape."""
    values = iter(advantages([[reward for group in groups for reward in group]])[0])
    return [[next(values) for _ in group] for group in groups]


def _credit(group: Rewards, advantages: Callable[[list[float]], list[float]]) -> list[float]:
    """``advantages`` of the group's scored rewards, put back in sibling order; 0 elsewhere and in degenerate groups."""
    scored = _scored(group)
    if len(scored) < 2 or _are_equal(scored):
        return [0.0] * len(group)
    values = iter(advantages(scored))
    return [next(values) if _is_scored(reward) else 0.0 for reward in group]


def _standardise(advantages: list[list[float]], groups: Sequence[Rewards], eps: float) -> list[list[float]]:
    """Standardise over the scored siblings of groups that have at least two of them; everyone else gets 0."""
    taken = [[len(_scored(group)) > 1 and _is_scored(reward) for reward in group] for group in groups]
    pool = [
        value
        for values, flags in zip(advantages, taken, strict=True)
        for value, flag in zip(values, flags, strict=True)
        if flag
    ]
    if len(pool) < 2 or _are_equal(pool):
        return [[0.0] * len(values) for values in advantages]
    mean, divisor = _mean(pool), _std(pool) + eps
    return [
        [(value - mean) / divisor if flag and divisor > 0.0 else 0.0 for value, flag in zip(values, flags, strict=True)]
        for values, flags in zip(advantages, taken, strict=True)
    ]


def _are_equal(values: Sequence[float]) -> bool:
    """Up to the rounding of sums: the same parts added in another order are no difference to learn from."""
    return max(values) - min(values) <= 1e-12 * max(abs(value) for value in values)


def _is_scored(reward: float | None) -> bool:
    return reward is not None and not math.isnan(reward)


def _scored(rewards: Iterable[float | None]) -> list[float]:
    return [float(reward) for reward in rewards if reward is not None and not math.isnan(reward)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Unbiased standard deviation (divisor ``n - 1``); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _check_eps(eps: float) -> None:
    if not eps >= 0.0 or math.isinf(eps):
        raise ConfigurationError(f"eps={eps!r} must be a number of at least 0, as 1e-4")


def _check_finite(groups: Sequence[Rewards]) -> None:
    for number, group in enumerate(groups):
        for sibling, reward in enumerate(group):
            if reward is not None and math.isinf(reward):
                raise ConfigurationError(
                    f"the reward of sibling {sibling} in group {number} is {reward}; rewards must be finite, "
                    "or None where a sibling cannot be scored"
                )
