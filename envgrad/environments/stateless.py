"""What plays a dataset's prompts where no environment is given: nothing happens but the model's answer."""

from __future__ import annotations

from dataclasses import replace

from envgrad.environments.contract import inspect_environment
from envgrad.environments.spec import EnvironmentSpec


class NoEnvironment:
    """Keeps the row's prompt, has no tools, and leaves the reward to reward functions."""

    def reset(self) -> None:
        """The row's prompt stays as it is."""


def stateless_spec() -> EnvironmentSpec:
    """The environment without a name that keeps every prompt.

    Example:
        >>> stateless_spec().stateless
        True
    """
    spec, _ = inspect_environment("", NoEnvironment)
    return replace(spec, stateless=True)
