"""What the agent reads of a Gymnasium environment: known games in words, and observations as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A game of Gymnasium in words."""

    actions: tuple[str, ...]
    prompt: str


_CART = Known(
    actions=("left", "right"),
    prompt=(
        "A pole stands on a cart. Push the cart left or right to keep the pole upright and the cart on its track. "
        "You see the cart's position and speed, and the pole's angle and angular speed."
    ),
)
_LAKE = Known(
    actions=("left", "down", "right", "up"),
    prompt=(
        "Cross the frozen lake from the upper left to the lower right corner without falling into a hole. The ice may "
        "be slippery. You see the number of your square, counted row by row."
    ),
)
_CLIFF = Known(
    actions=("up", "right", "down", "left"),
    prompt=(
        "Walk from the lower left to the lower right corner of a field of 4 rows and 12 columns. Between them is a "
        "cliff. Each step costs 1, and the cliff costs 100. You see the number of your square, counted row by row."
    ),
)

KNOWN: Mapping[str, Known] = {
    "CartPole": _CART,
    "MountainCar": Known(
        actions=("left", "none", "right"),
        prompt=(
            "A car is in a valley and too weak to drive straight up. Swing it up the hill on the right. Each step "
            "costs 1. You see its position and speed."
        ),
    ),
    "Acrobot": Known(
        actions=("negative", "none", "positive"),
        prompt=(
            "Two links hang from a joint. Apply torque between them until the free end swings above the line. Each "
            "step costs 1. You see cosine and sine of both angles, and both angular speeds."
        ),
    ),
    "Blackjack": Known(
        actions=("stick", "hit"),
        prompt=(
            "Play blackjack: get closer to 21 than the dealer, and not above it. You see your sum, the dealer's card, "
            "and whether you have a usable ace."
        ),
    ),
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "Taxi": Known(
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        prompt=(
            "Drive a taxi on a grid of 5 rows and 5 columns: pick the passenger up and drop him at his destination. "
            "Each step costs 1, a wrong pickup or dropoff 10. You see one number that stands for the taxi's row and "
            "column, the passenger's place and the destination."
        ),
    ),
}
"""by id without version"""


def describe(observation: object) -> str:
    """An observation in numbers: arrays with four significant digits, mappings line by line.

    Example:
        >>> describe({"speed": 0.123456, "cards": (13, True)})
        'speed: 0.1235\\ncards: 13 yes'
    """
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {describe(value)}" for name, value in observation.items())
    listed = getattr(observation, "tolist", None)
    value = listed() if callable(listed) else observation
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "\n".join(describe(row) for row in value)
    if isinstance(value, str) or not isinstance(value, Iterable):
        return _scalar(value)
    return " ".join(describe(item) for item in value)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
