"""Options of several environments: sizes and limits of each, a curriculum between them; and dynamic sampling."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from envgrad.config.checks import at_least, at_most_concurrent, choice
from envgrad.environments.curriculum import CurriculumOptions
from envgrad.errors import ConfigurationError

if TYPE_CHECKING:
    from envgrad.config.rollout import RolloutConfig

CurriculumKind: TypeAlias = Literal["variance"]

DYNAMIC_ROUNDS = 3
"""``max_dynamic_rounds`` where it is not set"""


@dataclass
class MixtureFields:
    """The fields; ``RolloutConfig`` has them."""

    environment_options: dict[str, dict[str, Any]] | str | None = field(
        default=None,
        metadata={
            "help": "Options of single environments by name: {'chess': {'num_generations': 4, 'max_turns': 40}}; also "
            "max_completion_length, max_turn_tokens, episode_timeout, tool_timeout, temperature."
        },
    )
    curriculum: str | None = field(
        default=None,
        metadata={"help": "variance: shares of named environments follow the reward variance inside their groups."},
    )
    curriculum_min_share: float | None = field(
        default=None, metadata={"help": "Least share of each environment under a curriculum; 0.05 by default."}
    )
    curriculum_decay: float | None = field(
        default=None,
        metadata={"help": "Weight of the past at each group in the curriculum's estimate; 0.9 by default."},
    )
    dynamic_sampling: bool = field(
        default=False, metadata={"help": "Replace groups that teach nothing (equal rewards) by further tasks (DAPO)."}
    )
    max_dynamic_rounds: int | None = field(
        default=None,
        metadata={"help": "How often dynamic_sampling does so in a round; what is left then fills it. 3 by default."},
    )

    def curriculum_options(self) -> CurriculumOptions | None:
        """What the task stream needs for the curriculum; None without one."""
        if self.curriculum is None:
            return None
        given = {"min_share": self.curriculum_min_share, "decay": self.curriculum_decay}
        return CurriculumOptions(**{name: value for name, value in given.items() if value is not None})

    def dynamic_rounds(self) -> int | None:
        """The bound of dynamic sampling; None if it is off."""
        if not self.dynamic_sampling:
            return None
        return DYNAMIC_ROUNDS if self.max_dynamic_rounds is None else self.max_dynamic_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """One environment's size of group, limits and temperature: the run's, but for those it has of its own."""

    num_generations: int
    max_completion_length: int
    max_turns: int | None
    max_turn_tokens: int | None
    episode_timeout: float | None
    tool_timeout: float | None
    temperature: float

    @classmethod
    def of_run(cls, config: RolloutConfig) -> EnvironmentOptions:
        """What holds for environments without options of their own."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})


COUNTS = ("num_generations", "max_completion_length", "max_turns", "max_turn_tokens")
NEEDED = ("num_generations", "max_completion_length", "temperature")
"""options that cannot be None: there is always a limit"""


def environment_options(config: RolloutConfig) -> dict[str, EnvironmentOptions]:
    """The options of the environments that have some of their own, by name.

    Raises:
        ConfigurationError: an option that is not known, or whose value cannot work.

    Example:
        >>> from envgrad.config import RolloutConfig
        >>> config = RolloutConfig(output_dir="runs/doc", max_turns=8, environment_options={"chess": {"max_turns": 40}})
        >>> config.environment_options["chess"], environment_options(config)["chess"].num_generations
        ({'max_turns': 40}, 8)
    """
    run = EnvironmentOptions.of_run(config)
    return {
        name: replace(run, **_checked(name, given))
        for name, given in (config.mapping("environment_options") or {}).items()
    }


def own_temperatures(config: RolloutConfig) -> dict[str, float]:
    """Environments that are sampled at a temperature that is not the run's."""
    own = {name: options.temperature for name, options in environment_options(config).items()}
    return {name: value for name, value in own.items() if value != config.temperature}


def _checked(name: str, given: object) -> dict[str, Any]:
    where = f"environment_options[{name!r}]"
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}={given!r} must be a mapping of options, as {{'max_turns': 6}}")
    known = [f.name for f in fields(EnvironmentOptions)]
    for option, value in given.items():
        if option not in known:
            raise ConfigurationError(
                f"{where} has no option {option!r}{nearest(str(option), known)}; the options are {', '.join(known)}"
            )
        _check_value(f"{where}[{option!r}]", option, value)
    return dict(given)


def _check_value(where: str, option: str, value: object) -> None:
    if value is None and option not in NEEDED:
        return
    whole = option in COUNTS
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        none = "" if option in NEEDED else ", or None for no limit"
        raise ConfigurationError(f"{where}={value!r} must be {'a whole number' if whole else 'a number'}{none}")
    if not isinstance(value, (int, float)) or not (value >= 1 if whole else value > 0):
        raise ConfigurationError(f"{where}={value!r} must be {'at least 1' if whole else 'above 0'}")


def nearest(name: str, known: Collection[str]) -> str:
    """A hint at the nearest known name, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def check_environment_names(config: RolloutConfig, names: Collection[str], *, named: bool) -> None:
    """Options of environments must be of environments that there are.

    Args:
        names: of the environments.
        named: whether the user gave the names, as ``environment_factory={name: class}``.

    Raises:
        ConfigurationError: options without named environments, or for a name that none of them has.
    """
    given = config.mapping("environment_options")
    if given is None:
        return
    if not named:
        raise ConfigurationError(
            f"environment_options={given!r} is for named environments: give environment_factory={{name: class}}, or "
            "set the options themselves, which hold for all episodes"
        )
    for name in given:
        if name not in names:
            raise ConfigurationError(
                f"environment_options names {name!r}, which is none of the environments{nearest(str(name), names)}; "
                f"use one of {', '.join(names)}"
            )


def check_mixture(config: RolloutConfig) -> None:
    """
    Raises:
        ConfigurationError: a value of these fields that cannot work, alone or with the batch sizes.
    """
    if config.curriculum is not None:
        choice("curriculum", config.curriculum, get_args(CurriculumKind))
    at_least("max_dynamic_rounds", config.max_dynamic_rounds, 1)
    for option, switch, value in (
        ("curriculum_min_share", "curriculum='variance'", None if config.curriculum else config.curriculum_min_share),
        ("curriculum_decay", "curriculum='variance'", None if config.curriculum else config.curriculum_decay),
        ("max_dynamic_rounds", "dynamic_sampling=True", None if config.dynamic_sampling else config.max_dynamic_rounds),
    ):
        if value is not None:
            raise ConfigurationError(f"{option}={value!r} acts only with {switch}; set that too")
    config.curriculum_options()
    for name, options in environment_options(config).items():
        size = options.num_generations
        where = f"environment_options[{name!r}]['num_generations']"
        at_least(where, size, min(2, config.num_generations), why="a group needs a sibling to compare with")
        at_most_concurrent(where, size, config.max_concurrent_episodes)
        if size != config.num_generations and config.episodes_per_step % config.num_generations:
            raise ConfigurationError(
                f"{where}={size} differs from num_generations={config.num_generations}, so an optimizer step holds "
                f"whole groups: its {config.episodes_per_step} episodes must be a multiple of num_generations"
            )
