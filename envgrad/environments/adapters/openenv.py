"""Environments behind an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), as environments of ours.

::

    OpenEnvEnvironment(url)    the factory: what is asked of the server; picklable
      |- Link                  shared by all instances: the server, which it may have started, and its schemas
      `- ()                    an instance: a session at the server from ``reset`` until the episode is scored
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, get_args

from envgrad.environments.adapters.openenv_link import Link
from envgrad.environments.adapters.openenv_play import OpenEnvInstance, Rules, instance_class
from envgrad.environments.adapters.openenv_server import check_app
from envgrad.environments.adapters.openenv_text import Render
from envgrad.environments.adapters.openenv_wire import Address, Patience
from envgrad.environments.adapters.task_splits import check_split
from envgrad.errors import ConfigurationError

Paid = Literal["last", "sum"]
Determinism = Literal["fixed", "task", "seeded", "none"]


@dataclass(frozen=True)
class OpenEnvEnvironment:
    """An ``environment_factory`` that plays an environment behind an OpenEnv server.

    The server says how a model acts. Where an action needs one string and nothing else, the model's text is the
    action; other actions become one tool with the action's fields; an environment that serves MCP tools shows those.
    What the server refuses goes back to the model in words.

    The task is drawn by the server, from ``seed``, which is equal for all siblings of a group; or, where the server
    has tasks by index, it is the group's index.

    Args:
        url: of a running server, as ``http://127.0.0.1:8000``.
        start: ``module:app`` of a server to start instead, on a free port of the loopback. It ends with the last
            instance, and with this process.
        python: interpreter of the started server; this one if None. It needs ``uvicorn`` and the server's packages.
        folder: working folder of the started server, where its modules are found too.
        text: the action's field that takes the model's text. False: tools in any case. None: as the action's schema
            suggests.
        tool: name of the tool that the action becomes; None: after the action's title.
        prompt: words before the first observation.
        observation: what of an observation is shown: a field, or a function from the observation (a dict) to a text.
            None: its only field as it is, several as JSON.
        cumulative: each observation repeats the earlier ones; only its new part is shown.
        reward: the episode's is the ``last`` one that the server gave, or the ``sum``, which pays turn by turn.
        no_reward: what an episode earns in which the server gave none, as when the model never acted; None: it cannot
            be scored.
        tasks: play the server's tasks, if it has some; False: draw by seed.
        split: the server's split for training, or a part of it, ``train[:80]``. None: its first.
        eval_split: for evaluation. None: see ``task_splits.task_ranges``.
        reset_options: further arguments of the server's reset.
        determinism: what decides an episode beside the actions; ``check_environment`` probes it. ``fixed``: nothing,
            there is one task. None: ``task`` or ``seeded``.
        compare_state: also compare the server's ``state`` of siblings after reset, where hidden differences show.
        keep_session: reset the session for the next episode, of whichever instance, instead of opening a new one: for
            environments that are slow to make, and whose reset leaves nothing behind.
        max_sessions: sessions at once from this process; further episodes wait for one, ``capacity_timeout`` seconds at
            most. No more groups are played at once than have a session for each sibling. None: no limit.
        connect_timeout: seconds for a connection.
        capacity_timeout: seconds to wait for a session, and that a full server is asked again for a place.
        start_timeout: seconds until a started server listens.
        headers: of every request.

    Raises:
        ConfigurationError: an option that cannot work; the package ``websockets`` is not there. When called: a server
            that does not answer, or whose tasks or actions are not as the options say.

    Example:
        >>> OpenEnvEnvironment("127.0.0.1")
        Traceback (most recent call last):
        envgrad.errors.ConfigurationError: url='127.0.0.1' must be a server's address, as http://127.0.0.1:8000
    """

    url: str | None = None
    _: KW_ONLY
    start: str | None = None
    python: str | None = None
    folder: str | None = None
    text: str | bool | None = None
    tool: str | None = None
    prompt: str = ""
    observation: str | Render | None = None
    cumulative: bool = False
    reward: Paid = "last"
    no_reward: float | None = 0.0
    tasks: bool = True
    split: str | None = None
    eval_split: str | None = None
    reset_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    determinism: Determinism | None = None
    compare_state: bool = False
    keep_session: bool = False
    max_sessions: int | None = None
    connect_timeout: float = 10.0
    capacity_timeout: float = 60.0
    start_timeout: float = 60.0
    headers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    _link: Link = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_server()
        self._check_words()
        for option in ("split", "eval_split"):
            if (value := getattr(self, option)) is not None:
                check_split(option, value)
        if not self.tasks and (self.split or self.eval_split):
            raise ConfigurationError(
                f"split={self.split!r}, eval_split={self.eval_split!r} cannot act with tasks=False: leave one out"
            )
        for option in ("connect_timeout", "capacity_timeout", "start_timeout"):
            if not getattr(self, option) >= 0:
                raise ConfigurationError(f"{option}={getattr(self, option)!r} must be seconds, at least 0")
        link = Link(self.url, self.start, self.python, self.folder, self.headers, self.start_timeout, self.max_sessions)
        object.__setattr__(self, "_link", link)

    def _check_server(self) -> None:
        if (self.url is None) == (self.start is None):
            raise ConfigurationError(
                f"url={self.url!r}, start={self.start!r}: give one of them, the address of a running server or the app "
                "to start"
            )
        if self.url is not None:
            Address.of(self.url)
            if self.python is not None or self.folder is not None:
                raise ConfigurationError("python= and folder= are of a server that start= starts: leave them out")
        else:
            check_app(self.start or "")
        if importlib.util.find_spec("websockets") is None:
            raise ConfigurationError("OpenEnvEnvironment needs the package websockets: pip install 'envgrad[openenv]'")

    def _check_words(self) -> None:
        if self.reward not in get_args(Paid):
            raise ConfigurationError(f"reward={self.reward!r} must be 'last' or 'sum'")
        if self.determinism is not None and self.determinism not in get_args(Determinism):
            raise ConfigurationError(
                f"determinism={self.determinism!r} must be one of {', '.join(get_args(Determinism))}, or None"
            )
        if self.text is True:
            raise ConfigurationError("text=True says too little: name the action's field, or leave it None")
        if isinstance(self.text, str) and self.tool is not None:
            raise ConfigurationError(f"tool={self.tool!r} cannot act with text={self.text!r}: text calls no tools")
        if {"seed", "split", "index"} & set(self.reset_options):
            raise ConfigurationError(
                f"reset_options={dict(self.reset_options)}: seed, split and index are the group's; leave them out"
            )

    @property
    def __name__(self) -> str:
        """What reports and metrics call it."""
        return "OpenEnvEnvironment"

    def __call__(self) -> OpenEnvInstance:
        self._link.enter()
        made: OpenEnvInstance | None = None
        try:
            rules = self._rules()
            made = instance_class(rules)(self._link, rules)
        finally:
            self._link.leave()  # the instance has entered on its own
        return made

    def _rules(self) -> Rules:
        by_index = self.tasks and self.determinism != "fixed"
        ranges = self._link.ranges(self.split, self.eval_split) if by_index else None
        return Rules(
            form=self._link.form(self.text, self.tool),
            ranges=ranges,
            determinism=self.determinism or ("seeded" if ranges is None else "task"),
            prompt=self.prompt,
            observation=self.observation,
            cumulative=self.cumulative,
            reward=self.reward,
            no_reward=self.no_reward,
            reset_options=self.reset_options,
            keep_session=self.keep_session,
            compare_state=self.compare_state,
            patience=Patience(connect=self.connect_timeout, full=self.capacity_timeout),
        )
