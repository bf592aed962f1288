"""``envgrad play``: a person plays an environment in the terminal, by the rollout's own code.

Two threads: the environment's episode goes on in the rollout's loop; the terminal is read and written here::

    Person.sample --Question--> Desk --> Terminal: shows what is new, reads a line --> Answer --> Person
"""

from __future__ import annotations

import asyncio
import queue
import sys
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console

from envgrad.cli.locate import locate
from envgrad.cli.person import ROOM, Person, Question
from envgrad.cli.play_display import show_end, show_failure, show_opening
from envgrad.cli.terminal import LeftGame, Terminal
from envgrad.cli.typed import Answer
from envgrad.environments.boundary import WorkerPool
from envgrad.environments.contract import EnvironmentSpec, inspect_environment
from envgrad.environments.pool import InstancePool
from envgrad.environments.spec import Factory
from envgrad.environments.tasks import build_task_stream
from envgrad.errors import ConfigurationError
from envgrad.rollout.context import EpisodeContext, EpisodeLimits
from envgrad.rollout.group import GroupPolicy, GroupRun
from envgrad.rollout.loop import RolloutLoop
from envgrad.sampling.sampler import SamplingParams
from envgrad.types import Group, Task

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequest:
    """Which episode is played, and within which limits."""

    environment: str
    row: str | None = None
    seed: int = 42
    task: int = 0
    split: str = "train"
    max_turns: int | None = None
    timeout: float | None = None


def run_play(request: PlayRequest) -> None:
    """Play one episode; what the environment prints goes to stderr.

    Raises:
        ConfigurationError: no such environment or task, a row that does not fit, or an agent of its own plays it.
        typer.Exit: code 1 if the environment failed or the input ended before the episode did; 130 if interrupted.
    """
    console = Console(file=sys.stdout)  # as it is now: what the environment prints goes elsewhere
    with redirect_stdout(sys.stderr):
        factory = locate(request.environment)
        spec, probe = inspect_environment(_name(factory), factory, columns=_columns(request))
        game = _Game(request, spec, probe, Terminal(console=console, stream=console.file))
        code = game.play()
    if code:
        raise typer.Exit(code)


def _name(factory: Factory) -> str:
    name = str(getattr(factory, "__name__", type(factory).__name__))
    return name if name.isidentifier() else "environment"


def _columns(request: PlayRequest) -> frozenset[str]:
    return frozenset(_row(request) or ())


def _row(request: PlayRequest) -> dict[str, Any] | None:
    if request.row is None:
        return None
    from envgrad.cli.check import read_row  # it brings all checks along

    return dict(read_row(request.row))


def draw_task(request: PlayRequest, spec: EnvironmentSpec) -> Task:
    """The task that a run with this seed draws at this place.

    Raises:
        ConfigurationError: there is none, or the split is neither train nor eval.
    """
    if request.split not in ("train", "eval"):
        raise ConfigurationError(f"--split {request.split!r} is no split: write train or eval")
    row = _row(request)
    rows = None if row is None else [row]
    stream = build_task_stream(
        {spec.name: spec}, seed=request.seed, split=request.split, dataset=rows, shuffle=request.split == "train"
    )
    drawn = stream.take(request.task + 1)
    return drawn[request.task]


@dataclass(slots=True)
class _Desk:
    """Where questions of the rollout's thread wait for the terminal's. None says that the episode is over."""

    questions: queue.SimpleQueue[tuple[Question, asyncio.Future[Answer]] | None] = field(
        default_factory=queue.SimpleQueue
    )

    async def ask(self, question: Question) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.questions.put((question, answered))
        return await answered


def _give(answered: asyncio.Future[Answer], answer: Answer) -> None:
    if not answered.done():
        answered.set_result(answer)


@dataclass(slots=True)
class _Game:
    """One episode, and who plays it."""

    request: PlayRequest
    spec: EnvironmentSpec
    probe: object
    terminal: Terminal
    desk: _Desk = field(init=False, default_factory=_Desk)
    seen: int = field(init=False, default=0)
    """messages of the main chat that were shown or typed"""

    def play(self) -> int:
        """The exit code."""
        workers, loop = WorkerPool(), RolloutLoop()
        pool = InstancePool(self.spec, self.probe, limit=2, workers=workers, close_timeout=CLOSE_SECONDS)
        try:
            if self.spec.runs_agent:
                raise ConfigurationError(
                    f"{self.spec.name} has an agent of its own (run_agent) that plays it; `envgrad check` tries it out"
                )
            task = draw_task(self.request, self.spec)
            policy = GroupPolicy(num_generations=1, max_episode_retries=0, group_consistency="off")
            run = GroupRun(context=self._context(workers), pool=pool, policy=policy, task=task)
            self.terminal.title(f"{self.spec.name}, task {task.key}")
            return self._follow(run, loop.submit(run.run()))
        finally:
            loop.run(pool.close())
            workers.close()
            loop.close()

    def _context(self, workers: WorkerPool) -> EpisodeContext:
        person, timeout = Person(self.desk.ask), self.request.timeout
        return EpisodeContext(
            spec=self.spec,
            renderer=person,
            sampler=person,
            sampling=SamplingParams(max_tokens=1),
            workers=workers,
            ask_feedback=True,
            limits=EpisodeLimits(
                max_completion_length=ROOM,
                max_context=ROOM,
                max_turns=self.request.max_turns,
                tool_timeout=timeout,
                reset_timeout=timeout,
                reward_timeout=timeout,
            ),
        )

    def _follow(self, run: GroupRun, playing: Future[Group]) -> int:
        """Answer until the episode is over."""
        playing.add_done_callback(lambda _: self.desk.questions.put(None))
        try:
            while (asked := self.desk.questions.get()) is not None:
                question, answered = asked
                answer = self._answer(question, run)
                answered.get_loop().call_soon_threadsafe(_give, answered, answer)
            return self._end(playing.result())
        except LeftGame as left:
            self.terminal.note("The input ended before the episode did." if left.input_ended else "Left.")
            return 1 if left.input_ended else 0
        except KeyboardInterrupt:
            return 130
        finally:
            playing.cancel()

    def _answer(self, question: Question, run: GroupRun) -> Answer:
        """Show what is new, and read what is typed."""
        begin = run.siblings[0].begin
        opening = None if begin is None else begin.opening
        if opening is None or question.chat != opening.prompt_ids[0]:
            self.terminal.note("The environment asks the policy, in a chat beside the episode:")
            self.terminal.messages(question.new)
            return self.terminal.read((), can_call=False)
        first = self.seen == 0
        self.seen += len(question.new) + 1
        self.terminal.messages(question.new)
        if first:
            show_opening(self.terminal.console, opening.tools, steps=self.spec.step_protocol)
        return self.terminal.read(opening.tools, can_call=bool(opening.tools))

    def _end(self, group: Group) -> int:
        console = self.terminal.console
        for failure in group.failures:
            show_failure(console, failure)
        for episode in group.episodes:
            self.terminal.messages(episode.messages[self.seen :])
            show_end(console, episode)
        return 1 if group.failures else 0
