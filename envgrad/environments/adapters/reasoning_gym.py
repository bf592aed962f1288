"""Datasets of reasoning-gym as environments: one question, one answer, scored by the dataset itself.

::

    ReasoningGymEnvironment("countdown")     a factory: picklable, checked when it is made
        () -> ReasoningGymEpisode            an instance; all of a factory share its items
                 reset(seed, task_index, split) -> question
                 step(answer) -> score, done
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from envgrad.environments.adapters.extras import require
from envgrad.environments.adapters.reasoning_gym_answers import SCREENS
from envgrad.environments.boundary import Raised, guard
from envgrad.environments.members import StepResult
from envgrad.environments.sources import hash63
from envgrad.errors import ConfigurationError, EnvironmentFailure
from envgrad.types import Message

logger = logging.getLogger(__name__)

PROMPTS = {
    "text": "Reply with the answer to the question and nothing else.",
    "tags": "Think about the question first. Then write the answer, and nothing else, between <answer> and </answer>.",
}
"""the system prompts of ``answer="text"`` and ``answer="tags"``"""
EVAL_SHARE = 5
"""every fifth question, by its hash, is for evaluation"""
MAX_TRIES = 500
"""items looked at for one of the split"""
KEPT_ITEMS = 64
SEEDS = 1 << 31
"""numpy's global generator, which one dataset seeds, takes 32 bits, and items add their number to the seed"""

FAULTY = {
    "game_of_life_halting": "it compares bool(answer) with bool(oracle): any text is right (reasoning-gym 0.1.25)",
}
"""datasets whose score says nothing about the answer"""

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


class ReasoningGymEnvironment:
    """One dataset of reasoning-gym, by its registered name. Pass it as ``environment_factory``.

    Each question is of one split, decided by its text: training and evaluation never share one, also where a small
    generator repeats itself.

    Args:
        name: e.g. ``"countdown"``.
        difficulty: level of the dataset's own curriculum, from 0; attributes with fewer levels stay at their last.
        tasks: how many training tasks there are, so that epochs mean something; None: endless.
        eval_tasks: how many tasks ``split="eval"`` has where ``tasks`` is given; None: a fifth of ``tasks``.
        answer: ``"text"``: the whole answer is scored; ``"tags"``: what stands in the last ``<answer>...</answer>``.
        system_prompt: None: the one of ``PROMPTS`` for ``answer``; an empty one: none.
        items: how many items the dataset can generate, from which tasks are taken. Some datasets need time or memory
            for each, or allow no more than 20000.
        seed: of the dataset; another one gives other items.
        **config: fields of the dataset's configuration, which win over ``difficulty``.

    Raises:
        ConfigurationError: reasoning-gym is not installed; an unknown dataset, option or level; values that the dataset
            refuses.

    Example:
        >>> sums = ReasoningGymEnvironment("chain_sum", min_terms=2, max_terms=2)     # doctest: +SKIP
        >>> GRPOTrainer("starter", args=config, environment_factory=sums).train()     # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        *,
        difficulty: int | None = None,
        tasks: int | None = None,
        eval_tasks: int | None = None,
        answer: str = "text",
        system_prompt: str | None = None,
        items: int = 20_000,
        seed: int = 0,
        **config: object,
    ) -> None:
        if answer not in PROMPTS:
            raise ConfigurationError(f"answer={answer!r} must be one of {', '.join(PROMPTS)}")
        self.name = name
        self.answer = answer
        self.system_prompt = PROMPTS[answer] if system_prompt is None else system_prompt
        items = _count("items", items, 1 << 31) or 1
        self.tasks = _count("tasks", tasks, items)
        self.eval_tasks = _count("eval_tasks", eval_tasks, items)
        if eval_tasks is not None and tasks is None:
            raise ConfigurationError(
                f"eval_tasks={eval_tasks} cannot act without tasks: endless tasks have an endless evaluation split, of "
                "which the trainer's eval_tasks plays some; give tasks, or leave eval_tasks out"
            )
        if tasks is not None and eval_tasks is None:
            self.eval_tasks = max(1, tasks // EVAL_SHARE)
        self.items = items
        self.seed = seed
        self.config = self._check(difficulty, config)
        self._source: Items | None = None
        self._lock = threading.Lock()
        self.found_items()
        if name in FAULTY:
            logger.warning("reasoning-gym's %s should not be trained on: %s.", name, FAULTY[name])

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"ReasoningGymEnvironment({self.name!r})"

    def __call__(self) -> ReasoningGymEpisode:
        """An instance. They share the factory's items, which are never changed."""
        kind = ReasoningGymEpisode if self.tasks is None else FiniteReasoningGymEpisode
        return kind(self)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key not in ("_source", "_lock")}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state, _source=None, _lock=threading.Lock())

    def count(self, split: str) -> int:
        """How many tasks ``split`` has."""
        count = self.eval_tasks if split == "eval" else self.tasks
        if count is None:
            raise AssertionError("endless tasks are not counted")
        return count

    def read(self, text: str) -> str | None:
        """The answer in a reply; None if it has none where ``answer="tags"``."""
        if self.answer == "text":
            return text.strip()
        found = _TAGGED.findall(text)
        return found[-1].strip() if found else None

    def found_items(self) -> Items:
        """The dataset's items, made by the first call in a process."""
        with self._lock:
            if self._source is None:
                package = require("reasoning_gym", extra="reasoning-gym", what="ReasoningGymEnvironment")
                seed = hash63("reasoning_gym", self.seed) % SEEDS
                made = guard(package.create_dataset, self.name, **self.config, seed=seed, size=self.items)
                if isinstance(made, Raised):
                    raise ConfigurationError(
                        f"reasoning-gym refuses {self.name} with {self.config}, items={self.items}: {made.error}"
                    ) from made.error
                self._source = Items(made.value, self.name, self.items)
            return self._source

    def _check(self, difficulty: int | None, config: Mapping[str, object]) -> dict[str, object]:
        """The dataset's configuration as keyword arguments."""
        require("reasoning_gym", extra="reasoning-gym", what="ReasoningGymEnvironment")
        factory = require("reasoning_gym.factory", extra="reasoning-gym", what="ReasoningGymEnvironment")
        if self.name not in factory.DATASETS:
            close = difflib.get_close_matches(str(self.name), factory.DATASETS, n=3)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            raise ConfigurationError(f"reasoning-gym has no dataset {self.name!r}{hint}")
        known = {field.name for field in dataclasses.fields(factory.DATASETS[self.name][1])} - {"seed", "size"}
        for option in config:
            if option not in known:
                raise ConfigurationError(
                    f"{option!r} is no option of reasoning-gym's {self.name}; it has {', '.join(sorted(known))}"
                )
        level = {} if difficulty is None else _at_level(factory, self.name, difficulty)
        return {key: value for key, value in level.items() if key in known} | dict(config)


def _count(option: str, value: int | None, most: int) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most):
        raise ConfigurationError(f"{option}={value!r} must be an int from 1 to {most} (tasks are taken from the items)")
    return value


def _at_level(factory: Any, name: str, difficulty: int) -> dict[str, object]:
    """The configuration at a level of the dataset's curriculum."""
    if name not in factory.CURRICULA:
        raise ConfigurationError(
            f"difficulty={difficulty!r} cannot act: reasoning-gym's {name} has no curriculum; give its own options"
        )
    curriculum = factory.create_curriculum(name)
    top = max(len(attribute.levels) - 1 for attribute in curriculum.attributes.values())
    if isinstance(difficulty, bool) or not isinstance(difficulty, int) or not 0 <= difficulty <= top:
        raise ConfigurationError(f"difficulty={difficulty!r} must be a level of {name}'s curriculum, from 0 to {top}")
    for attribute in curriculum.attributes.values():
        curriculum.set_attr_level(attribute.name, min(difficulty, len(attribute.levels) - 1))
    made = guard(curriculum.generate_configuration, {})
    if isinstance(made, Raised):
        raise ConfigurationError(
            f"reasoning-gym's {name} refuses its own level {difficulty}: {made.error}"
        ) from made.error
    return {field.name: getattr(made.value, field.name) for field in dataclasses.fields(made.value)}  # type: ignore[arg-type]


class Items:
    """A dataset's items, found by number or seed and split; siblings ask for the same one, so the last are kept."""

    def __init__(self, dataset: Any, name: str, items: int) -> None:
        self.dataset = dataset
        self._name = name
        self._items = items
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[int, dict[str, Any]]] = OrderedDict()

    def find(self, split: str, number: int) -> tuple[int, dict[str, Any]]:
        """The item of ``split`` for a task's number (or seed), and its index in the dataset.

        Raises:
            EnvironmentFailure: none of ``MAX_TRIES`` items is of this split.
        """
        key = (split, number)
        with self._lock:  # one at a time: some datasets seed a process-global generator
            if key not in self._kept:
                self._kept[key] = self._search(split, number)
                if len(self._kept) > KEPT_ITEMS:
                    self._kept.popitem(last=False)
            return self._kept[key]

    def _search(self, split: str, number: int) -> tuple[int, dict[str, Any]]:
        for attempt in range(MAX_TRIES):
            index = hash63("item", split, number, attempt) % self._items if attempt else number % self._items
            entry = self.dataset[index]
            if (hash63("question", str(entry["question"])) % EVAL_SHARE == 0) == (split == "eval"):
                return index, entry
        raise EnvironmentFailure(
            f"none of {MAX_TRIES} items of reasoning-gym's {self._name} is of the split {split!r}: it has too few "
            "different questions; give it a configuration with more"
        )

    def score(self, answer: str | None, entry: dict[str, Any]) -> float:
        """The dataset's score, from 0 to 1. An answer on which scoring raises cannot be read, and is worth 0.

        Raises:
            EnvironmentFailure: the dataset cannot score its own oracle either, or gives what is no score.
        """
        if answer is None:
            return 0.0
        screen: Callable[[str], bool] | None = SCREENS.get(self._name)
        if screen is not None and answer != entry["answer"] and not screen(answer):
            return 0.0
        outcome = guard(self.dataset.score_answer, answer, entry)
        if isinstance(outcome, Raised):
            if entry["answer"] is not None:
                oracle = guard(self.dataset.score_answer, entry["answer"], entry)
                if isinstance(oracle, Raised):
                    raise EnvironmentFailure(
                        f"reasoning-gym's {self._name} cannot score its own oracle: {oracle.error}"
                    ) from oracle.error
            return 0.0
        score = float(outcome.value)  # type: ignore[arg-type]
        if not math.isfinite(score):
            raise EnvironmentFailure(f"reasoning-gym's {self._name} scored an answer {score}")
        return score


class ReasoningGymEpisode:
    """One question in play."""

    determinism: str | None = "seeded"

    def __init__(self, factory: ReasoningGymEnvironment) -> None:
        self._factory = factory
        self.index = -1
        self.entry: dict[str, Any] = {}
        self.score: float | None = None

    def reset(self, seed: int, split: str = "train") -> list[Message]:
        return self._open(split, seed)

    def _open(self, split: str, number: int) -> list[Message]:
        self.index, self.entry = self._factory.found_items().find(split, number)
        self.score = None
        system = self._factory.system_prompt
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*opening, {"role": "user", "content": str(self.entry["question"])}]

    def step(self, message: str) -> StepResult:
        self.score = self._factory.found_items().score(self._factory.read(message), self.entry)
        return StepResult("", reward=self.score, done=True)

    def get_feedback(self) -> str | None:
        """The score, and the dataset's own answer where it stores one."""
        oracle = self.entry.get("answer")
        return f"Your answer scored {self.score}." + ("" if oracle is None else f" A right answer is: {oracle}")

    def start_state(self) -> object:
        return {"index": self.index, "question": str(self.entry["question"]), "answer": self.entry["answer"]}


class FiniteReasoningGymEpisode(ReasoningGymEpisode):
    """The same over a fixed number of tasks."""

    determinism: str | None = "task"

    def reset(self, task_index: int, split: str = "train") -> list[Message]:
        return self._open(split, task_index)

    def num_tasks(self, split: str) -> int:
        return self._factory.count(split)
