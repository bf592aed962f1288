from __future__ import annotations

import logging
import pickle
from types import SimpleNamespace

import pytest

from envgrad import check_environment
from envgrad.environments.adapters.reasoning_gym import PROMPTS, ReasoningGymEnvironment
from envgrad.environments.adapters.reasoning_gym_answers import is_arithmetic, is_expression, is_literal
from envgrad.environments.check.report import Determinism, Level, Rule
from envgrad.environments.contract import inspect_environment
from envgrad.errors import ConfigurationError, EnvironmentFailure

pytest.importorskip("reasoning_gym")


def sums(**changes):
    given = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return ReasoningGymEnvironment("chain_sum", **(given | changes))


def test_the_dataset_asks_and_scores():
    episode = sums()()
    system, question = episode.reset(seed=5)
    assert system == {"role": "system", "content": PROMPTS["text"]}
    first, sign, second = question["content"].split(":")[1].strip(" =").split()
    right = int(first) + int(second) if sign == "+" else int(first) - int(second)
    result = episode.step(f"  {right}\n")
    assert (result.reward, result.done, result.observation) == (1.0, True, "")
    episode.reset(seed=5)
    assert episode.step(str(right + 1)).reward == 0.0
    assert episode.get_feedback() == f"Your answer scored 0.0. A right answer is: {right}"


def test_answers_between_tags():
    episode = sums(answer="tags", system_prompt="")()
    (question,) = episode.reset(seed=5)
    assert question["role"] == "user"
    right = episode.entry["answer"]
    assert episode.step(f"<answer>1</answer> no, <Answer> {right} </answer>.").reward == 1.0
    assert episode.step(right).reward == 0.0  # not between tags


def test_siblings_share_an_item_and_seeds_choose_it():
    factory = sums()
    first, other = factory(), factory()
    assert first.reset(seed=7) == other.reset(seed=7) and first.start_state() == other.start_state()
    assert len({tuple(first.reset(seed=seed)[1].items()) for seed in range(20)}) > 10
    copy = pickle.loads(pickle.dumps(factory))
    assert copy().reset(seed=7) == other.reset(seed=7) and copy.__name__ == "chain_sum"
    assert pickle.loads(pickle.dumps(other)).start_state() == other.start_state()
    assert sums(seed=1)().reset(seed=7) != other.reset(seed=7)


def test_train_and_eval_never_share_a_question_though_the_generator_repeats_itself():
    few = ReasoningGymEnvironment("coin_flip", tasks=300, eval_tasks=60, min_trials=3, max_trials=4)
    episode = few()

    def questions(split, count):
        return [episode.reset(task_index=index, split=split)[-1]["content"] for index in range(count)]

    train, held_out = questions("train", episode.num_tasks("train")), questions("eval", episode.num_tasks("eval"))
    assert (len(train), len(held_out)) == (300, 60)
    assert len(set(train)) < 150  # it does repeat itself
    assert not set(train) & set(held_out)


def test_a_generator_with_too_few_questions_says_so(monkeypatch):
    factory = sums()
    monkeypatch.setattr(factory.found_items(), "dataset", Constant())
    with pytest.raises(EnvironmentFailure, match="none of 500 items of reasoning-gym's chain_sum is of the split"):
        for split in ("train", "eval"):
            factory().reset(seed=1, split=split)


class Constant:
    def __getitem__(self, index):
        return {"question": "1 + 1?", "answer": "2", "metadata": {}}


def test_what_cannot_be_read_is_worth_nothing_and_a_broken_dataset_is_a_failure():
    factory = ReasoningGymEnvironment("prime_factorization")
    episode = factory()
    episode.reset(seed=1)
    assert episode.step("I do not know").reward == 0.0  # the dataset raises on it
    assert episode.step(episode.entry["answer"]).reward == 1.0
    items, entry = factory.found_items(), {"question": "?", "answer": "2", "metadata": {}}

    def broken(answer, entry):
        raise ZeroDivisionError("by zero")

    items.dataset = SimpleNamespace(score_answer=broken)
    with pytest.raises(EnvironmentFailure, match="cannot score its own oracle: by zero"):
        items.score("2 x 3", entry)
    items.dataset = SimpleNamespace(score_answer=lambda answer, entry: float("nan"))
    with pytest.raises(EnvironmentFailure, match="scored an answer nan"):
        items.score("2 x 3", entry)


@pytest.mark.parametrize("name", ["n_queens", "binary_matrix", "spiral_matrix", "string_insertion", "countdown"])
def test_answers_are_never_run_as_code(name, tmp_path):
    episode = ReasoningGymEnvironment(name)()
    episode.reset(seed=3)
    mark = tmp_path / "ran"
    for text in (f"__import__('pathlib').Path({str(mark)!r}).touch()", f"[open({str(mark)!r}, 'w')]", "9**9**9"):
        assert episode.step(text).reward == 0.0
    assert not mark.exists()
    assert episode.step(episode.entry["answer"]).reward == 1.0


def test_screens_let_right_answers_pass():
    assert is_literal("[['Q', '_'], ['_', 'Q']]") and is_literal("Q _\n_ Q") and is_literal("two words")
    assert not is_literal("[x for x in ()]") and not is_literal("a.b") and not is_literal("x" * 5000)
    assert is_arithmetic("(75 - 3)*2 + 1.5") and not is_arithmetic("2^9") and not is_arithmetic("1" * 30)
    assert is_expression("-x**3/3 + 2*sin(x)/5 + (x^2+1)**2 + log(x) + C") and is_expression("exp(2*x)*pi")
    for text in ("x.real", "exit()", "eval(x)", "((x**9)**9)**9", "x**1000", "x**(9*99)", "f(x)(y)", "'a'*3", "x[0]"):
        assert not is_expression(text), text


def test_difficulty_is_a_level_of_the_curriculum():
    easy, hard = (ReasoningGymEnvironment("chain_sum", difficulty=level) for level in (0, 3))
    assert hard.config["max_digits"] > easy.config["max_digits"]
    lengths = [sum(len(one().reset(seed=seed)[1]["content"]) for seed in range(20)) for one in (easy, hard)]
    assert lengths[1] > lengths[0]
    given = ReasoningGymEnvironment("chain_sum", difficulty=3, max_terms=2, min_terms=2)
    assert given.config["max_terms"] == 2 and given.config["max_digits"] > 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("chain_sums", {}, r"no dataset 'chain_sums' \(did you mean .*chain_sum"),
        ("chain_sum", {"terms": 2}, "'terms' is no option of reasoning-gym's chain_sum; it has .*max_terms"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "refuses chain_sum"),
        ("chain_sum", {"difficulty": 99}, "must be a level of chain_sum's curriculum, from 0 to"),
        ("acre", {"difficulty": 0, "items": 100}, "acre has no curriculum"),
        ("chain_sum", {"answer": "json"}, "answer='json' must be one of text, tags"),
        ("chain_sum", {"tasks": 0}, "tasks=0 must be an int from 1 to 20000"),
        ("chain_sum", {"eval_tasks": 5}, "eval_tasks=5 cannot act without tasks"),
        ("word_ladder", {"items": 30_000}, "refuses word_ladder"),
    ],
)
def test_what_cannot_work_is_said_at_construction(name, options, words):
    with pytest.raises(ConfigurationError, match=words):
        ReasoningGymEnvironment(name, **options)


def test_a_faulty_dataset_is_named(caplog):
    with caplog.at_level(logging.WARNING):
        ReasoningGymEnvironment("game_of_life_halting")
    assert "game_of_life_halting should not be trained on" in caplog.text


def test_the_contract_is_kept():
    endless, finite = check_environment(sums()), check_environment(sums(tasks=20))
    assert (endless.determinism, finite.determinism) == (Determinism.SEEDED, Determinism.TASK)
    for report in (endless, finite):
        # This dataset pays a share for text that contains the answer.
        found = [one for one in report.findings if one.level is not Level.NOTE and one.rule is not Rule.AUDIT]
        assert not found, report
    spec, _ = inspect_environment("sums", sums())
    assert spec.step_protocol and spec.num_tasks is None
