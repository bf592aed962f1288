"""One recorded episode, played again: its environment gets the recorded answers, and the first difference is told.

Nothing is sampled and no model is loaded. The environment is made as the run made it, reset to the same task with the
same ids, and isolated as it was; where no id tells the task, the recorded state is put in the place of the one that
``reset`` drew. What was scored beside it (reward functions and models, ``group_reward``) is not
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import EnvironmentSpec, inspect_environment
from envgrad.environments.isolation import Isolation, use
from envgrad.environments.plain_start import NotPlain, restore_state
from envgrad.environments.policy import use_policy
from envgrad.environments.pool import InstancePool
from envgrad.environments.start import decide_start
from envgrad.environments.stateless import stateless_spec
from envgrad.environments.tools import build_tools
from envgrad.episodes.compare import Difference, episode_difference, failure_difference, opening_difference
from envgrad.episodes.factories import load_factory
from envgrad.episodes.reader import EpisodeReader
from envgrad.episodes.recorded import RecordedPolicy, Tape
from envgrad.episodes.records import EpisodeFilter, EpisodeRecord
from envgrad.errors import ConfigurationError, EpisodeFailure
from envgrad.rollout.context import EpisodeContext, EpisodeLimits
from envgrad.rollout.episode import play
from envgrad.rollout.loop import RolloutLoop
from envgrad.rollout.opening import EpisodeStart, open_prompt
from envgrad.rollout.starting import Starter
from envgrad.sampling.sampler import SamplingParams
from envgrad.types import StopReason, Task

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay found."""

    record: EpisodeRecord
    difference: Difference | None
    """the first one; None if the environment did the same again"""
    not_repeated: tuple[str, ...]
    """reward components that do not come from the environment alone"""

    @property
    def equal(self) -> bool:
        return self.difference is None


def replay_episode(reader: EpisodeReader, number: int, *, factory: Callable[[], object] | None = None) -> Replay:
    """Play episode ``number`` of a run again.

    Args:
        reader: Of the run.
        number: ``EpisodeSummary.number``.
        factory: Makes the environment, where the run's record does not tell how.

    Raises:
        ConfigurationError: it cannot be played again: there is none with this number, it failed or was not played by
            the episode loop, it asked the policy, or its environment cannot be made.
    """
    record = reader.episode(number)
    run = reader.run()
    _check(record, run)
    spec, probe = _environment(record, run, factory)
    policy = RecordedPolicy(_parts(reader, record))
    player = _Player(record, run, spec, policy)
    loop = RolloutLoop()
    try:
        return loop.run(player.play(probe))
    finally:
        loop.close()


def _check(record: EpisodeRecord, run: Mapping[str, Any]) -> None:
    number, summary = record.summary.number, record.summary
    why = None
    if summary.failed is not None:
        why = f"it failed ({summary.failed}), and what it did before is not recorded"
    elif summary.part:
        why = f"it is the part {summary.part!r} of another episode, which can be: the group's sibling {summary.sibling}"
    elif run.get("custom_rollout"):
        why = "a rollout_func played it"
    elif not record.row_is_exact:
        why = "its dataset row has values that JSON does not hold"
    if why is not None:
        raise ConfigurationError(f"episode {number} cannot be replayed: {why}")


def _environment(
    record: EpisodeRecord, run: Mapping[str, Any], factory: Callable[[], object] | None
) -> tuple[EnvironmentSpec, object]:
    name = record.summary.environment
    tools = build_tools([load_factory(described) for described in run.get("tools", ())])
    if not name:
        return stateless_spec().with_tools(tools), None
    described = run.get("environments", {}).get(name, {}).get("factory")
    if factory is None:
        if described is None:
            raise ConfigurationError(f"the run's record knows no environment {name!r}; give --factory module:Class")
        try:
            factory = load_factory(described)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; give --factory module:Class, which makes {name!r}") from error
    columns = frozenset(record.row or ())
    spec, probe = inspect_environment(name, factory, columns=columns, routed=run.get("routed", False))
    if spec.runs_agent:
        raise ConfigurationError(
            f"episode {record.summary.number} cannot be replayed: an agent of its own (run_agent) plays {name}"
        )
    return spec.with_tools(tools), probe


def _parts(reader: EpisodeReader, record: EpisodeRecord) -> dict[str, EpisodeRecord]:
    """What other parts of the policy's said in this episode."""
    siblings = reader.rows(EpisodeFilter(group=record.summary.group, current=None), limit=None)
    own = [row for row in siblings if row.part and row.sibling == record.summary.sibling]
    return {row.part: reader.episode(row.number) for row in own}


@dataclass(slots=True)
class _Player:
    """One replay."""

    record: EpisodeRecord
    run: Mapping[str, Any]
    spec: EnvironmentSpec
    policy: RecordedPolicy

    async def play(self, probe: object) -> Replay:
        tape = Tape(self.record)
        workers = WorkerPool()
        if probe is None:
            _, probe = inspect_environment("", self.spec.factory)
        pool = InstancePool(self.spec, probe, limit=4, workers=workers, close_timeout=CLOSE_SECONDS)
        try:
            difference = await self._difference(self._context(tape, workers), pool, tape)
        finally:
            await pool.close()
            workers.close()
        if self.policy.asked_unrecorded:
            raise ConfigurationError(
                f"episode {self.record.summary.number} cannot be replayed: its environment asks the policy "
                "(ask_policy), whose answers are not recorded; play_part's are"
            )
        others = tuple(name for name in self.record.summary.rewards if name in self._others())
        return Replay(record=self.record, difference=difference, not_repeated=others)

    async def _difference(self, context: EpisodeContext, pool: InstancePool, tape: Tape) -> Difference | None:
        summary, task = self.record.summary, self._task()
        starter = Starter(context, pool, task)
        try:
            with use_policy(self.policy, self.policy):
                begin = await starter.fresh()
                if self.record.start is not None:
                    await self._restore(context, begin, self.record.start)
                forks = not decide_start(self.spec, task, begin.instance).resets_each
                if forks and summary.sibling:
                    starter.pristine = begin
                    begin = await starter.fork(begin)
        except EpisodeFailure as failure:
            return Difference(where="opening", recorded="the environment did not fail", replayed=str(failure))
        try:
            difference = opening_difference(self.record, begin.opening)
            if difference is not None:
                return difference
            with use(begin.stream), use_policy(self.policy, self.policy):
                episode = await play(context, begin, task, summary.sibling, summary.attempt)
            return episode_difference(self.record, episode, self._others())
        except EpisodeFailure as failure:
            begin.usable = False
            return failure_difference(self.record, tape.results, str(failure))
        finally:
            await starter.end(begin)
            await starter.end_pristine()

    async def _restore(self, context: EpisodeContext, begin: EpisodeStart, start: str) -> None:
        """Put the recorded state in the place of the one that ``reset`` drew; the recorded opening belongs to it."""
        try:
            restore_state(begin.instance, start)
        except NotPlain as error:
            raise ConfigurationError(f"episode {self.record.summary.number} cannot be replayed: {error}") from error
        messages = [dict(message) for message in self.record.messages[: self.record.opening]]
        begin.opening = await open_prompt(context, begin.instance, messages, replace(self._task(), row=None))

    def _context(self, tape: Tape, workers: WorkerPool) -> EpisodeContext:
        limits = self.run.get("environments", {}).get(self.spec.name, {}).get("limits", {})
        ended = self.record.summary.stop_reason == StopReason.MAX_TURNS
        return EpisodeContext(
            spec=self.spec,
            renderer=tape,
            sampler=tape,
            sampling=SamplingParams(max_tokens=1),
            workers=workers,
            isolation=Isolation(self.spec.isolation_mode(self.run.get("isolate_generators", "auto"))),
            ask_feedback=self.record.feedback is not None,
            limits=EpisodeLimits(
                max_completion_length=tape.room,
                max_context=tape.room,
                max_turns=len(self.record.turns) if ended else None,
                tool_timeout=limits.get("tool_timeout"),
                reset_timeout=limits.get("reset_timeout"),
                reward_timeout=limits.get("reward_timeout"),
            ),
        )

    def _task(self) -> Task:
        summary = self.record.summary
        return Task(
            position=summary.position,
            split=summary.split,
            environment=summary.environment,
            group_id=summary.group_id,
            seed=summary.seed,
            task_index=summary.task_index,
            epoch=self.record.epoch,
            row=self.record.row,
        )

    def _others(self) -> frozenset[str]:
        """Names of components that the environment alone does not give."""
        return frozenset([*self.run.get("reward_sources", ()), *(["group"] if self.spec.has_group_reward else [])])
