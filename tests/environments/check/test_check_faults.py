"""Environments with one planted fault each: every fault is found, and named."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from envgrad.environments.check import CheckReport, Determinism, Level, Rule, check_environment
from helpers import faulty

BREACH, WARNING, NOTE = Level.BREACH, Level.WARNING, Level.NOTE


def only(report: CheckReport, level: Level, rule: Rule, member: str) -> str:
    """What was seen by the one finding about ``rule`` and ``member``."""
    (found,) = [finding for finding in report.of(rule) if finding.member == member]
    assert found.level is level, str(report)
    assert found.fix
    return found.seen


@pytest.mark.parametrize(
    ("environment", "level", "rule", "member", "seen"),
    [
        (faulty.RandomReward, BREACH, Rule.DETERMINISM, "get_reward", "it declares determinism = 'seeded'"),
        (faulty.UndeclaredRandomReward, WARNING, Rule.DETERMINISM, "get_reward", "equal actions gave different"),
        (faulty.DeclaredRandomReward, NOTE, Rule.DETERMINISM, "get_reward", "the reward is 0."),
        (faulty.SharedClassList, BREACH, Rule.SHARED, "SharedClassList.history", "so far' once"),
        (faulty.SharedCounter, BREACH, Rule.SHARED, "SharedCounter.current", "another instance, played between"),
        (faulty.SharedDefault, BREACH, Rule.SHARED, "log", "changed another one's log:"),
        (faulty.ModuleState, NOTE, Rule.SHARED, "helpers.faulty.SCORES", "all instances share it"),
        (faulty.IgnoresSeed, WARNING, Rule.IDS_IGNORED, "reset", "it takes seed, but 20 different ids"),
        (faulty.UnseededStart, BREACH, Rule.START, "reset", "the opening is 'Guess my letter. It is not"),
        (faulty.HiddenName, WARNING, Rule.START, "name", "equal ids start with different state"),
        (faulty.GlobalRandom, WARNING, Rule.GLOBAL_RANDOM, "random", "Training gives each instance a stream"),
        (faulty.LateGlobalRandom, WARNING, Rule.GLOBAL_RANDOM, "random", "isolate_generators='always'"),
        (faulty.CloseOnce, BREACH, Rule.CLOSE, "close", "the second close raised AssertionError: closed already"),
        (faulty.CloseNeedsReset, BREACH, Rule.CLOSE, "close", "never reset raised AttributeError"),
        (faulty.InfiniteReward, BREACH, Rule.REWARD, "get_reward", "returned inf"),
        (faulty.NanReward, BREACH, Rule.REWARD, "get_reward", "NaN in the component 'style'"),
        (faulty.TextReward, BREACH, Rule.REWARD, "get_reward", "returned '1.0' (str)"),
        (faulty.NanTurn, BREACH, Rule.REWARD, "guess", "it gave NaN"),
        (faulty.FailsWithoutGuess, BREACH, Rule.RAISED, "get_reward", 'an agent that says "I do not know."'),
        (faulty.BytesChoice, BREACH, Rule.CONTRACT, "the class", "'word' has the type typing.Literal[b'hey']"),
        (faulty.NoAnnotation, BREACH, Rule.CONTRACT, "the class", "'word' has no type annotation"),
        (faulty.NanChoice, BREACH, Rule.SCHEMA, "shout", "cannot be rendered"),
        (faulty.ForkSharesList, BREACH, Rule.FORK, "fork", "changed the original's guesses: 0 items != 3 items"),
        (faulty.ForkForgets, BREACH, Rule.FORK, "fork", "!= 'z'"),
        (faulty.ForkSelf, BREACH, Rule.FORK, "fork", "returned the instance itself"),
        (faulty.SplitIgnored, BREACH, Rule.SPLIT, "reset", "32 of 32 tasks of split='eval'"),
        (faulty.DoneNeedsArgument, BREACH, Rule.CONTRACT, "the class", "got the method done(strict"),
        (faulty.DoneIsText, BREACH, Rule.DONE, "done", "must be true or false, got 'no'"),
        (faulty.DoneIsMethod, NOTE, Rule.DONE, "done", "it is a method"),
        (faulty.HiddenId, NOTE, Rule.START, "reset", "in its **kwargs"),
        (faulty.NanAndIgnoresSeed, WARNING, Rule.IDS_IGNORED, "reset", "it takes seed"),
        (faulty.DoneAtOnce, WARNING, Rule.DONE, "done", "true right after reset"),
        (faulty.Leftover, BREACH, Rule.REUSE, "guesses", "after another episode"),
        (faulty.LosesState, BREACH, Rule.STATE, "load_state_dict", "state['rounds']"),
        (faulty.UnsavableState, BREACH, Rule.STATE, "state_dict", "cannot be saved"),
        (faulty.MovesTheFolder, WARNING, Rule.PROCESS, "os.environ", "GUESS_A_LETTER"),
        (faulty.NoPrompt, BREACH, Rule.PROMPT, "reset", "returned 42 (int)"),
        (faulty.ResetRaises, BREACH, Rule.RAISED, "reset", "in reset: raise ZeroDivisionError"),
        (faulty.ToolFailsEpisode, BREACH, Rule.RAISED, "guess", "EnvironmentFailure: the guess was wrong"),
        (faulty.WrongDeclaration, BREACH, Rule.DETERMINISM, "determinism", "it declares 'fixed'"),
        (faulty.UnknownDeclaration, NOTE, Rule.DETERMINISM, "determinism", "it says 'mostly'"),
        (faulty.Independent, BREACH, Rule.START, "reset", "siblings cannot share a task"),
        (faulty.Finite, WARNING, Rule.SPLIT, "reset", "10 of 10 tasks of split='eval'"),
        (faulty.OffByOne, BREACH, Rule.RAISED, "reset", "This was task_index 9, the last one of split='train'."),
        (faulty.NoTasks, BREACH, Rule.NUM_TASKS, "num_tasks", "no task for training"),
        (faulty.ParsesNumbers, BREACH, Rule.RAISED, "step", "for the text 'I do not know.' it raised ValueError"),
        (faulty.PaysSilence, WARNING, Rule.AUDIT, "the reward", "refusal 1, silent 1, echo 1, junk 1 and empty 1"),
        (faulty.PaysTrying, WARNING, Rule.AUDIT, "the random agent", "something in each of 12 episodes"),
        (faulty.PaysAll, WARNING, Rule.AUDIT, "the reward", "every agent earned 1, whatever it did"),
        (faulty.StepsCost, NOTE, Rule.AUDIT, "the reward", "to do nothing is cheaper"),
        (faulty.FindsWords, WARNING, Rule.AUDIT, "the reward", "echo 1"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_fault_is_found_and_named(
    environment: type, level: Level, rule: Rule, member: str, seen: str
) -> None:
    report = check_environment(environment)
    assert seen in only(report, level, rule, member), str(report)
    assert report.ok == (level is not BREACH)
    # Nothing else is wrong with it, so nothing else is a breach, but for what follows from the fault.
    others = {finding.rule for finding in report.at(BREACH)} - {rule}
    assert others <= ({Rule.FORK} if environment is faulty.SharedDefault else set()), str(report)


@pytest.mark.parametrize(
    ("environment", "member"),
    [
        (faulty.Hangs, "reset"),
        (faulty.HangsInReward, "get_reward"),
        (faulty.BlocksTheLoop, "reset"),
        (faulty.NeverAwaited, "reset"),
    ],
)
def test_what_hangs_is_a_finding_and_hangs_nobody(
    environment: type, member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envgrad.environments.check.run.GRACE", 3.0)
    start = time.monotonic()
    report = check_environment(environment, timeout=3.0)
    assert time.monotonic() - start < 50  # it would return after 60
    assert "did not return within 3 s" in only(report, BREACH, Rule.HANG, member)
    assert "hangs" in only(report, NOTE, Rule.NOT_CHECKED, "the rest")
    assert not report.audit


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        (faulty.Sound, Determinism.SEEDED),
        (faulty.IgnoresSeed, Determinism.FIXED),
        (faulty.HiddenId, Determinism.SEEDED),
        (faulty.SameSeries, Determinism.NONE),
        (faulty.KeepsNan, Determinism.SEEDED),
        (faulty.Finite, Determinism.TASK),
        (faulty.RandomReward, Determinism.NONE),
        (faulty.Independent, Determinism.NONE),
        (faulty.GlobalRandom, Determinism.SEEDED),  # with a stream for each instance, as in training
    ],
)
def test_the_level_of_determinism(environment: type, level: Determinism) -> None:
    assert check_environment(environment).determinism is level


def test_a_finding_tells_the_line() -> None:
    seen = only(check_environment(faulty.ResetRaises), BREACH, Rule.RAISED, "reset")
    line = faulty.ResetRaises.reset.__code__.co_firstlineno + 1
    assert f"(faulty.py:{line} in reset: raise ZeroDivisionError(" in seen


def test_one_group_is_enough_to_see_what_is_left_behind() -> None:
    report = check_environment(faulty.Leftover, groups=1)
    assert "after another episode" in only(report, BREACH, Rule.REUSE, "guesses")


def test_tasks_that_begin_alike_are_told_apart_by_later_ones() -> None:
    class Late(faulty.Finite):
        def reset(self, task_index: int) -> str:
            return super().reset(max(0, task_index - 5))

    assert check_environment(Late, groups=3).determinism is Determinism.TASK


@pytest.mark.parametrize(
    ("draw", "member", "fix"),
    [
        (lambda: random.randrange(9), "random", "random.Random(seed)"),
        (lambda: int(np.random.randint(9)), "numpy", "numpy.random.default_rng(seed)"),
    ],
)
def test_the_fix_names_a_generator_of_the_same_library(draw: Callable[[], int], member: str, fix: str) -> None:
    class Draws(faulty.Sound):
        def reset(self, seed: int, split: str = "train") -> str:
            self.drawn = draw()
            return super().reset(seed, split)

    (found,) = check_environment(Draws).of(Rule.GLOBAL_RANDOM)
    assert found.member == member and fix in found.fix
