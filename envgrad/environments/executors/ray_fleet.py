"""The actors of one environment: made where an instance has no seat, filled, and buried when they die.

::

    open() -> a seat on an actor that is placed, else on one that waits for its place, else on a new one
    an actor dies (its process, its node) -> every seat on it is lost; the next open() makes a new actor
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from envgrad.environments.boundary import Raised, guard
from envgrad.environments.closing import call_all_now
from envgrad.environments.executors import ray_cluster
from envgrad.environments.executors.ray_actor import EnvironmentActor
from envgrad.environments.executors.ray_options import PLACEMENTS, RayOptions
from envgrad.environments.remote.wire import Closed, Message, decode, rebuild_error
from envgrad.errors import ConfigurationError, EnvironmentFailure

OPEN_SECONDS = 300.0
"""until an instance must be built, its actor's server started included"""
END_SECONDS = 8.0
CALLS = 10_000
"""that one actor runs at once"""


@dataclass(slots=True, eq=False)
class Post:
    """One actor."""

    actor: Any
    number: int
    name: str
    load: int = 0
    """seats that are taken"""
    where: str | None = None
    """None: it has no place yet"""
    pid: int = 0
    dead: str | None = None

    def __str__(self) -> str:
        return f"actor {self.number} of {self.name!r} ({self.where or 'not placed yet'})"


@dataclass(slots=True, eq=False)
class Seat:
    """One instance's place on an actor, until ``leave``."""

    fleet: Fleet
    post: Post
    number: int
    left: bool = False

    @property
    def lost(self) -> bool:
        """Whether its actor is dead."""
        return self.post.dead is not None

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Ask the actor's ``method`` about this seat.

        Raises:
            Closed: the actor is dead, or was closed.
        """
        if self.post.dead is not None:
            raise Closed(self.post.dead)
        made = guard(getattr(self.post.actor, method).remote, self.number, *arguments)
        if isinstance(made, Raised):
            raise Closed(f"{self.post} cannot be asked: {made.error}") from made.error
        reference: Any = made.value
        future: Future[Any] = reference.future()
        return future

    def answer(self, error: Exception) -> Exception:
        """What ``error``, of a call's future, means: ``Closed`` where the actor has died."""
        if self.fleet.is_death(error):
            self.fleet.bury(self.post, error)
            return Closed(self.post.dead or "")
        return error

    def tell(self, method: str, *arguments: object) -> None:
        """``call``, of which nobody awaits anything."""
        if self.post.dead is None:
            guard(getattr(self.post.actor, method).remote, self.number, *arguments)

    def fork(self) -> Seat:
        """A further seat on the same actor: a copy lives beside its original."""
        return self.fleet.sit(self.post)

    def leave(self) -> None:
        """End the instance's process, and give the seat back. Again is harmless."""
        if not self.left:
            self.left = True
            self.tell("leave")
            self.fleet.stand_up(self.post)


class Fleet:
    """Actors of one environment. Safe to use from several threads.

    Args:
        name: the environment's.
        pickle: gives the factory, pickled; asked once Ray is there.
        options: how the cluster is used.
    """

    def __init__(self, name: str, pickle: Callable[[], bytes], options: RayOptions) -> None:
        self.name, self.options = name, options
        self._pickle = pickle
        self._changed = threading.Condition()
        self._ray: Any = None
        self._class: Any = None
        self._posts: list[Post] = []
        self._buried: list[Post] = []
        """actors that were given up, to be killed by the next thread that may wait for it"""
        self._pickled = b""
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()
        """stand-ins of instances"""
        self._life = 0
        """counts closings"""
        self._num_posts = self._num_seats = 0

    @property
    def posts(self) -> tuple[Post, ...]:
        """The actors that live, placed or not."""
        with self._changed:
            return tuple(self._posts)

    def open(self) -> tuple[Seat, Message]:
        """A seat with a new instance, and what that says of itself.

        Raises:
            ConfigurationError: there is no cluster, or its nodes cannot import the environment.
            EnvironmentFailure: no place in time, the factory raised, or its actor died twice.
            EnvironmentContractError: what breaks the contract.
        """
        died = ""
        for _ in range(2):
            seat = self._take()
            opened = False
            try:
                made = guard(lambda: seat.call("open").result(OPEN_SECONDS))  # noqa: B023 - it runs here
                if isinstance(made, Raised):
                    error = seat.answer(made.error)
                    if isinstance(error, TimeoutError):
                        raise EnvironmentFailure(f"{seat.post} did not build an instance in {OPEN_SECONDS:.0f} s")
                    if not isinstance(error, Closed):
                        raise error
                    died = str(error)
                    continue
                greeting = decode(made.value)  # type: ignore[arg-type]
                if "refused" in greeting:
                    raise ConfigurationError(f"{seat.post}: {greeting['refused']['text']}")
                if "error" in greeting:
                    raise rebuild_error(greeting["error"])
                opened = True
                return seat, greeting
            finally:
                if not opened:
                    seat.leave()
        raise EnvironmentFailure(f"no instance could be built: {died}")

    def sit(self, post: Post) -> Seat:
        with self._changed:
            self._num_seats += 1
            post.load += 1
            return Seat(self, post, self._num_seats)

    def stand_up(self, post: Post) -> None:
        with self._changed:
            post.load -= 1
            self._changed.notify_all()

    def is_death(self, error: Exception) -> bool:
        """Whether ``error`` says that an actor, or the way to it, is gone."""
        errors = None if self._ray is None else self._ray.exceptions
        return errors is not None and isinstance(error, errors.RayError) and not isinstance(error, errors.RayTaskError)

    def bury(self, post: Post, error: BaseException) -> None:
        """All seats on ``post`` are lost. Does not wait for anything."""
        with self._changed:
            if post.dead is None:
                post.dead = f"{post} is gone: {_reason(error)}"
                self._buried.append(post)
                if post in self._posts:
                    self._posts.remove(post)
                self._changed.notify_all()

    def close(self) -> None:
        """End all actors with their instances, and leave the cluster; the next ``open`` starts anew."""
        with self._changed:
            self._life += 1
            ray, self._ray, self._class = self._ray, None, None
            posts, self._posts = self._posts, []
            for post in posts:
                post.dead = f"{post} was closed"
            self._changed.notify_all()
        if ray is None:
            return
        placed = [post for post in posts if post.where is not None]
        asked = [made.value for post in placed if not isinstance(made := guard(post.actor.close.remote), Raised)]
        if asked:  # they end what instances have started, in order
            guard(ray.wait, asked, num_returns=len(asked), timeout=END_SECONDS)
        for post in (*posts, *self._taken_buried()):
            guard(ray.kill, post.actor)
        ray_cluster.leave(self, ray)

    def end(self) -> None:
        """At the interpreter's exit, as long as there is a Ray that could: close the instances too."""
        call_all_now([one.close for one in list(self.living)], timeout=ray_cluster.EXIT_SECONDS)
        self.close()

    # -- places

    def _take(self) -> Seat:
        """A seat on an actor that has its place."""
        with self._changed:
            ray, life = self._joined(), self._life
        for post in self._taken_buried():
            guard(ray.kill, post.actor)
        end = time.monotonic() + self.options.placement_seconds
        waits_for: Post | None = None
        deaths = 0
        with self._changed:
            try:
                while True:
                    if life != self._life:
                        raise EnvironmentFailure(f"the actors of {self.name!r} are closed, the run has ended")
                    if waits_for is not None and waits_for.where is not None and waits_for.dead is None:
                        return self.sit(waits_for)
                    found = self._with_a_seat(waits_for)
                    if found is not None and found.where is not None:
                        return self.sit(found)
                    if found is not waits_for:  # it died, or there is one now
                        if waits_for is not None:
                            waits_for.load -= 1
                            deaths += 1
                        if waits_for is not None and deaths > 1:
                            why, waits_for = waits_for.dead, None
                            raise EnvironmentFailure(f"actors die as soon as they are made: {why}")
                        waits_for = found
                        if found is not None:
                            found.load += 1
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
            finally:
                if waits_for is not None:
                    waits_for.load -= 1
                    if waits_for.where is None and waits_for.dead is None and not waits_for.load:
                        self._withdraw(waits_for)
        raise EnvironmentFailure(self._no_place(ray))

    def _with_a_seat(self, waits_for: Post | None) -> Post | None:
        """An actor with a free seat: one that is placed, else the one that is waited for, else a new one."""
        free = [post for post in self._posts if post.load < self.options.seats]
        placed = [post for post in free if post.where is not None]
        if placed:
            return min(placed, key=lambda post: post.load)
        if waits_for is not None and waits_for.dead is None:
            return waits_for
        if free:
            return free[0]
        return self._make() if len(self._posts) < self.options.actors else None

    def _make(self) -> Post:
        self._num_posts += 1
        options = self.options.resources.options(self.options.seats)
        strategy = PLACEMENTS[self.options.placement]
        path = [os.path.abspath(folder or ".") for folder in sys.path]
        actor = self._class.options(
            **options, scheduling_strategy=strategy, max_restarts=0, max_concurrency=CALLS, enable_task_events=False
        ).remote(self.name, self._pickled, path)
        post = Post(actor, self._num_posts, self.name)
        self._posts.append(post)
        actor.where.remote().future().add_done_callback(lambda found: self._placed(post, found))
        actor.watch.remote().future().add_done_callback(lambda ended: self._ended(post, ended))
        return post

    def _placed(self, post: Post, found: Future[Any]) -> None:
        """In a thread of Ray's."""
        error = None if found.cancelled() else found.exception()
        if error is not None:
            self.bury(post, error)
            return
        told = found.result()
        with self._changed:
            post.pid = int(told["pid"])
            post.where = f"process {post.pid} on node {told['address']} {str(told['node'])[:8]}"
            self._changed.notify_all()

    def _ended(self, post: Post, ended: Future[Any]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self.bury(post, error)

    def _withdraw(self, post: Post) -> None:
        """Nobody waits any more for an actor that has no place."""
        post.dead = f"{post} was given up"
        self._posts.remove(post)
        self._buried.append(post)

    def _taken_buried(self) -> list[Post]:
        with self._changed:
            buried, self._buried = self._buried, []
            return buried

    def _joined(self) -> Any:
        if self._ray is None:
            ray = ray_cluster.join(self, self.options.address)
            self._pickled = self._pickle()
            self._class = ray.remote(EnvironmentActor)
            self._ray = ray
        return self._ray

    def _no_place(self, ray: Any) -> str:
        options = self.options
        waited = f"within {options.placement_seconds:g} s"
        posts = self.posts
        if len(posts) >= options.actors and all(post.where is not None for post in posts):
            return (
                f"all {len(posts)} actors of {self.name!r} kept their {options.seats} environments each {waited}: "
                "raise max_concurrent_episodes or environments_per_actor"
            )
        there = guard(ray_cluster.told, ray)
        return (
            f"no actor of {self.name!r} could be placed and started {waited}: it asks for "
            f"{options.resources.told(options.seats)} (environments_per_actor={options.seats}); "
            f"{there.error if isinstance(there, Raised) else there.value}. Lower environment_resources, "
            "environments_per_actor or max_concurrent_episodes, or add nodes"
        )


def _reason(error: BaseException) -> str:
    """The line of Ray's many that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "because" in line), lines[0])[:400]
