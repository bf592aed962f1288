"""The parts of the scaling benchmark: what its sampler and its environment play is what the simulation draws."""

from __future__ import annotations

import asyncio

from benchmarks.ours import FILLER
from benchmarks.scaling import CONFIGURATIONS, MARK, PlannedTurns, SamplerSteps, environment
from envgrad.sampling.sampler import Sampler, SamplingParams, Session
from envgrad.sampling.scripted import ScriptedSampler
from envgrad.scaling.workload import Draw, Workload

LOAD = Workload(
    groups=2,
    siblings=2,
    turns=Draw(mean=3, cv=0.4),
    prompt_tokens=9,
    turn_tokens=Draw(mean=12, cv=0.6),
    result_tokens=4,
)
END, SIGN = 3, 7


def test_it_samples_through_the_whole_protocol() -> None:
    members = {name for name in vars(Sampler) if not name.startswith("_")}
    assert members <= set(dir(PlannedTurns))


def test_answers_have_the_lengths_of_the_table_and_only_the_last_is_marked() -> None:
    inner = ScriptedSampler(lambda prompt, params, session: [SIGN] * params.max_tokens, max_context=4096)
    sampler = PlannedTurns(inner, LOAD, end=END, mark=SIGN)

    async def play(position: int, sibling: int) -> list[tuple[int, ...]]:
        session = Session(key=f"{position}/{sibling}", group=str(position), order=(position, sibling, 0))
        sampler.begin(session)
        plan = LOAD.turn_plan(position, sibling)
        answers = [
            (await sampler.sample([1, 2], SamplingParams(max_tokens=500), session)).token_ids for _ in range(len(plan))
        ]
        sampler.end(session)
        assert [len(answer) for answer in answers] == list(plan)
        return answers

    for position in range(3):
        *others, last = asyncio.run(play(position, 1))
        assert last[0] == SIGN and last[-1] == (END if len(last) > 1 else SIGN)
        assert all(answer[0] == FILLER and answer[-1] == END for answer in others if len(answer) > 1)


def test_the_environment_ends_at_the_mark() -> None:
    one = environment(LOAD, "words", "result")()
    assert one.reset(seed=5).startswith("Task 00005")
    assert asyncio.run(one.step("hello")) == ("result", False)
    assert asyncio.run(one.step(MARK + " hello")) == ("result", True)


def test_steps_of_one_kind_are_summed() -> None:
    class Stats:
        prefill_tokens = sampled_tokens = 0

    class Engine:
        stats = Stats()

        def step(self, *, patience: float = 0.0) -> list[object]:
            self._run([])
            self.stats.prefill_tokens += 5
            self.stats.sampled_tokens += 3
            return []

        def _run(self, plan: list[object]) -> None:
            return None

    steps, engine = SamplerSteps(), Engine()
    steps.watch(engine)
    engine.step()
    steps.counted = True
    engine.step()
    engine.step()
    (row,) = steps.rows()
    assert (row["steps"], row["rows"], row["prefill"], row["prefilling"]) == (2, 6, 10, True)


def test_nothing_that_is_checked_was_fitted() -> None:
    fitted = [one.load for one in CONFIGURATIONS if one.use == "fit"]
    checked = [one.load for one in CONFIGURATIONS if one.use == "check"]
    assert 3 <= len(fitted) <= 5 and len(checked) >= 6
    assert not any(load in fitted for load in checked)
    assert len({one.name for one in CONFIGURATIONS}) == len(CONFIGURATIONS)
