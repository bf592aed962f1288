"""The entropy bonus's coefficient, moved towards a target entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from envgrad.errors import ConfigurationError


@dataclass(slots=True, kw_only=True)
class EntropyController:
    """Adaptive entropy control (Skywork-OR1, arXiv:2505.22312): more bonus while the policy's entropy is too low.

    ::

        applied      = coefficient  if the last step's entropy <= target else 0
        coefficient += delta        if this step's entropy <= target else -delta,   kept within [least, most]

    The first step has no entropy before it, so its bonus is 0. Entropies are in nats, means over the whole step's
    tokens that the bonus acts on.

    Raises:
        ConfigurationError: bounds or a step that cannot work.

    Example:
        >>> control = EntropyController(coefficient=0.0, target=1.0, delta=0.1, least=0.0, most=0.15)
        >>> for entropy in (2.0, 0.9, 0.8):
        ...     control.update(entropy)
        ...     print(control.coefficient, control.applied)
        0.0 0.0
        0.1 0.1
        0.15 0.15
    """

    coefficient: float
    target: float
    delta: float = 0.005
    least: float = 0.0
    most: float = 1.0
    last_entropy: float = inf

    def __post_init__(self) -> None:
        if not self.least <= self.most:
            raise ConfigurationError(
                f"entropy_coef_min={self.least} must be at most entropy_coef_max={self.most}; swap them"
            )
        if not self.delta > 0:
            raise ConfigurationError(f"entropy_coef_delta={self.delta} must be above 0, as 0.005; else nothing adapts")
        if not self.least <= self.coefficient <= self.most:
            raise ConfigurationError(
                f"entropy_coef={self.coefficient} must start within entropy_coef_min={self.least} and "
                f"entropy_coef_max={self.most}"
            )
        if not self.target > 0:
            raise ConfigurationError(f"entropy_target={self.target} must be above 0 nats; set it near the first steps'")

    @property
    def applied(self) -> float:
        """The bonus's coefficient in the coming step."""
        return self.coefficient if self.last_entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Take up the mean entropy of the step that was made."""
        change = self.delta if entropy <= self.target else -self.delta
        self.coefficient = min(max(self.coefficient + change, self.least), self.most)
        self.last_entropy = entropy

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coefficient, self.last_entropy = state["coefficient"], state["last_entropy"]
