"""One episode's calls, answered by the sampler and recorded token by token.

A call whose messages extend those of an earlier one appends to its row; any other begins a row of its own::

    call 1   [system, user]                           row 0: opening | a0
    call 2   [system, user, a0, tool]                 row 0: opening | a0 | suffix | a1
    call 3   [system, user: "summarise ..."]          row 1: opening'| b0
    call 4   [system, user, a0, tool, a1, user]       row 0: opening | a0 | suffix | a1 | suffix | a2

What was sampled is never encoded again. A row that is being answered is not extended: a second call that could extend
it begins a row, so that an agent may ask for several answers at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from envgrad.agents.wire import ApiError, ChatRequest, Reply, TokenLogprob, refuse
from envgrad.environments.arguments import clean_text
from envgrad.environments.tasks import hash63
from envgrad.errors import ConfigurationError, SamplerFailure
from envgrad.rollout.context import EpisodeContext
from envgrad.rollout.episode import session_of
from envgrad.rollout.opening import Opening
from envgrad.rollout.row import TokenRow
from envgrad.sampling.sampler import Completion, Session
from envgrad.types import EpisodeRow, Message, StopReason, Task, ToolCall, ToolOutcome, Turn

GONE, FAILED = 410, 500
"""status of calls after the episode's end, and after its failure; clients that repeat a 500 get it again"""


@dataclass(slots=True, eq=False)
class _Chat:
    """A chat of the agent's, and its row."""

    number: int
    session: Session
    tools: tuple[dict[str, object], ...]
    opening: tuple[Message, ...]
    row: TokenRow
    keys: list[Hashable] = field(default_factory=list)
    """what each message so far is recognized by, the last answer's included"""
    turns: list[Turn] = field(default_factory=list)
    turn_ids: tuple[int, ...] = ()
    """the last answer as it was sampled"""
    answered_at: float = 0.0
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Next:
    """What a call adds to a chat before it is answered."""

    results: tuple[Message, ...]
    suffix: tuple[int, ...]
    budget: int
    limit: StopReason | None
    """which limit of ours the budget is; None where the call asked for less"""


@dataclass(slots=True)
class Recorder:
    """Answers the calls of one attempt of one sibling. All on the rollouts' loop."""

    context: EpisodeContext
    opening: Opening
    task: Task
    sibling: int
    attempt: int
    stop: StopReason | None = field(init=False, default=None)
    """the limit that the last call met; None if it was answered and not cut"""
    failure: SamplerFailure | None = field(init=False, default=None)
    chats: list[_Chat] = field(init=False, default_factory=list)
    sample_seconds: float = field(init=False, default=0.0)
    _last: _Chat | None = field(init=False, default=None)
    _order: list[tuple[_Chat, int]] = field(init=False, default_factory=list)
    """every turn, as ``(chat, number in the chat)``, in the order of the answers"""
    _asked: int = field(init=False, default=0)
    _under_way: int = field(init=False, default=0)
    _closed: bool = field(init=False, default=False)

    @property
    def session(self) -> Session:
        """The first chat's session, which the group has begun."""
        return session_of(self.task, self.sibling, self.attempt)

    async def answer(self, request: ChatRequest) -> Reply:
        """Sample the answer to one call.

        Raises:
            ApiError: the call cannot be answered: a limit of the episode, messages that cannot be rendered, or an
                episode that is over.
        """
        self._check_open()
        chat, results = self._find(request)
        new = chat is None
        try:
            if chat is None:
                chat = self._begin(request)
            call = self._prepare(chat, results, request)
        except ConfigurationError as error:  # of the template, mostly
            raise ApiError(400, str(error), code="invalid_messages", param="messages") from error
        if new:
            self._open(chat)
        chat.busy = True
        number, began = self._asked, time.perf_counter()
        self._asked += 1
        self._under_way += 1
        try:
            completion = await self._sample(chat, call, request, number)
        finally:
            chat.busy = False
            self._under_way -= 1
        if self._closed:
            raise _gone()
        return self._record(chat, call, completion, request, began)

    def close(self) -> None:
        """Answer no more, and end the further chats' sessions. The first one's ends with the episode."""
        self._closed = True
        for chat in self.chats[1:]:
            self.context.sampler.end(chat.session)

    # -- which row

    def _find(self, request: ChatRequest) -> tuple[_Chat | None, tuple[Message, ...]]:
        """The chat that the request extends, and the messages that it adds; None if it extends none."""
        keys = [_key(message) for message in request.messages]
        best: _Chat | None = None
        for chat in self.chats:
            length = len(chat.keys)
            if chat.busy or not chat.turns or chat.tools != request.tools or not length < len(keys):
                continue
            added = request.messages[length:]
            if keys[:length] != chat.keys or not all(message["role"] in ("tool", "user") for message in added):
                continue
            if best is None or length > len(best.keys):
                best = chat
        return best, request.messages[len(best.keys) :] if best is not None else ()

    def _begin(self, request: ChatRequest) -> _Chat:
        messages = tuple(_cleaned(message) for message in request.messages)
        number = len(self.chats)
        session = self.session
        if number:
            session = replace(session, key=f"{session.key}/row-{number}", order=(*session.order, number))
        prompt = self.context.renderer.open(_named(messages), list(request.tools) or None)
        return _Chat(number, session, request.tools, messages, TokenRow(prompt), [_key(one) for one in messages])

    def _open(self, chat: _Chat) -> None:
        if chat.number:
            self.context.sampler.begin(chat.session)
        self.chats.append(chat)

    def _prepare(self, chat: _Chat, results: tuple[Message, ...], request: ChatRequest) -> _Next:
        """
        Raises:
            ApiError: a limit of the episode leaves no room for an answer.
            ConfigurationError: the template cannot print these messages.
        """
        if request.logprobs and chat.row.token_ids[0] < 0:
            raise refuse("logprobs: the model is behind an endpoint, which gives none", "logprobs")
        limits = self.context.limits
        suffix: tuple[int, ...] = ()
        if results:
            results = _with_names(tuple(_cleaned(message) for message in results), chat.turns[-1].message)
            suffix = tuple(self.context.renderer.suffix(chat.turn_ids, results, list(request.tools) or None))
        if limits.max_turns is not None and len(self._order) + self._under_way >= limits.max_turns:
            raise self._over(StopReason.MAX_TURNS, f"max_turns={limits.max_turns} answers were given")
        spent = sum(one.row.completion_length for one in self.chats) + len(suffix)
        room = {
            StopReason.MAX_COMPLETION_LENGTH: limits.max_completion_length - spent,
            StopReason.CONTEXT: limits.max_context - len(chat.row) - len(suffix),
        }
        for limit, left in room.items():
            if left <= 0:
                tokens = limits.max_context if limit is StopReason.CONTEXT else limits.max_completion_length
                raise self._over(limit, f"{limit} of {tokens} tokens leaves no room for an answer")
        if limits.max_turn_tokens is not None:
            room[StopReason.MAX_TURN_TOKENS] = limits.max_turn_tokens
        limit = min(room, key=lambda one: room[one])
        if request.max_tokens is not None and request.max_tokens < room[limit]:
            return _Next(results=results, suffix=suffix, budget=request.max_tokens, limit=None)
        return _Next(results=results, suffix=suffix, budget=room[limit], limit=limit)

    def _over(self, limit: StopReason, why: str) -> ApiError:
        self.stop = limit
        return ApiError(400, f"the episode's limit is reached: {why}", code="context_length_exceeded", param="messages")

    def _check_open(self) -> None:
        if self.failure is not None:
            raise ApiError(FAILED, f"the sampler failed: {self.failure}", code="sampler_failed")
        if self._closed:
            raise _gone()

    # -- the answer

    async def _sample(self, chat: _Chat, call: _Next, request: ChatRequest, number: int) -> Completion:
        own = self.context.sampling
        params = replace(
            own,
            max_tokens=call.budget,
            stop_strings=tuple(dict.fromkeys((*own.stop_strings, *request.stop))),
            # As in the ordinary loop: the answer's number in the episode.
            seed=hash63("sample", self.task.seed, self.sibling, self.attempt, number),
        )
        try:
            with self.context.activity.during("sample"):
                return await self.context.sampler.sample([*chat.row.token_ids, *call.suffix], params, chat.session)
        except SamplerFailure as failure:
            self.failure = failure
            raise ApiError(FAILED, f"the sampler failed: {failure}", code="sampler_failed") from failure

    def _record(self, chat: _Chat, call: _Next, completion: Completion, request: ChatRequest, began: float) -> Reply:
        now = time.perf_counter()
        held = len(chat.row)
        if call.results:
            self._take_results(chat, call.results, began)
        chat.row.add_given(call.suffix)
        start = len(chat.row)
        chat.row.add_sampled(
            completion.token_ids,
            completion.logprobs,
            version=completion.policy_version,
            versions=completion.versions,
        )
        number = sum(message["role"] == "assistant" for message in chat.opening) + len(chat.turns)
        read = self.context.renderer.read(completion.token_ids, list(request.tools) or None, turn=number)
        message = _cut(read.message, request.stop)
        chat.turns.append(
            Turn(
                start=start,
                num_tokens=len(completion.token_ids),
                policy_version=completion.policy_version,
                message=message,
                text=read.text,
                sample_seconds=now - began,
                row=chat.number,
            )
        )
        chat.keys.append(_key(message))
        chat.turn_ids, chat.answered_at = completion.token_ids, now
        self._order.append((chat, len(chat.turns) - 1))
        self._last = chat
        self.sample_seconds += now - began
        cut = completion.stop_reason == "length"
        self.stop = call.limit if cut else None
        calls = bool(message.get("tool_calls"))
        return Reply(
            id=f"chatcmpl-{self.task.position}-{self.sibling}-{len(self._order)}",
            message=message,
            finish_reason="length" if cut else "tool_calls" if calls else "stop",
            prompt_tokens=start,
            cached_tokens=held if call.suffix else 0,
            completion_tokens=len(completion.token_ids),
            policy_version=completion.policy_version,
            logprobs=self._logprobs(completion) if request.logprobs else None,
        )

    def _logprobs(self, completion: Completion) -> tuple[TokenLogprob, ...]:
        read = self.context.renderer.read_text
        return tuple(
            TokenLogprob(text=read([token]).text, logprob=logprob)
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        )

    def _take_results(self, chat: _Chat, results: Sequence[Message], now: float) -> None:
        """What the agent's tools and its user answered, on the turn that asked."""
        last = chat.turns[-1]
        known = {call["id"]: call["function"] for call in last.message.get("tool_calls") or ()}
        outcomes = []
        for result in results:
            if result["role"] == "tool":
                name = str(result.get("tool_call_id"))
                function = known.get(name, {})
                call = ToolCall(id=name, name=function.get("name"), arguments=function.get("arguments"))
                outcomes.append(ToolOutcome(call=call, content=str(result["content"]), ok=True, tool=call.name))
        said = [str(result["content"]) for result in results if result["role"] == "user"]
        chat.turns[-1] = replace(
            last,
            outcomes=tuple(outcomes),
            observation="\n".join(said) if said else None,
            tool_seconds=now - chat.answered_at,
        )
        chat.keys += [_key(result) for result in results]

    # -- what is left of it

    def stop_reason(self) -> StopReason:
        """Why the episode ended, where the agent ended it by itself or a limit did."""
        if self.stop is not None:
            return self.stop
        answered = self._last is not None and not self._last.turns[-1].message.get("tool_calls")
        return StopReason.ANSWER if answered else StopReason.DONE

    def rows(self) -> tuple[EpisodeRow, ...]:
        """The chats with an answer: that of the last answer first. The task's opening alone, if nothing was asked."""
        rows = [chat.row for chat in self._ranked()] or [TokenRow(self.opening.prompt_ids)]
        return tuple(
            EpisodeRow(
                token_ids=tuple(row.token_ids),
                mask=tuple(row.mask),
                logprobs=tuple(row.logprobs),
                versions=tuple(row.versions),
                prompt_length=row.prompt_length,
            )
            for row in rows
        )

    def turns(self) -> tuple[Turn, ...]:
        """All turns in the order of their answers, with the numbers that ``rows`` gives to chats."""
        rank = {chat.number: number for number, chat in enumerate(self._ranked())}
        return tuple(replace(chat.turns[at], row=rank[chat.number]) for chat, at in self._order)

    def messages(self) -> tuple[Message, ...]:
        """The main row's chat: its opening, then answers, tool results and user messages."""
        if self._last is None:
            return self.opening.messages
        messages: list[Message] = list(self._last.opening)
        for turn in self._last.turns:
            messages.append(turn.message)
            messages += [
                {"role": "tool", "tool_call_id": one.call.id, "name": one.call.name or "", "content": one.content}
                for one in turn.outcomes
            ]
            if turn.observation is not None:
                messages.append({"role": "user", "content": turn.observation})
        return tuple(messages)

    def tools(self) -> tuple[dict[str, object], ...]:
        """The schemas that the main row's prompt shows."""
        return () if self._last is None else self._last.tools

    def _ranked(self) -> list[_Chat]:
        answered = [chat for chat in self.chats if chat.turns]
        return sorted(answered, key=lambda chat: (chat is not self._last, chat.number))


def _gone() -> ApiError:
    return ApiError(GONE, "the episode is over: its endpoint answers no more", code="episode_over")


def _cleaned(message: Message) -> Message:
    return {**message, "content": clean_text(message["content"])}


def _named(messages: Sequence[Message]) -> list[Message]:
    """Tool results with the names of the tools, which some templates print and clients leave out."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and "name" not in message:
            message = {**message, "name": names.get(str(message.get("tool_call_id")), "")}
        named.append(message)
    return named


def _with_names(results: Sequence[Message], answer: Message) -> tuple[Message, ...]:
    return tuple(_named([answer, *results])[1:])


def _cut(message: Message, stops: Sequence[str]) -> Message:
    """The answer without the stop text that the call asked for, and what is behind it; its tokens stay in the row."""
    content = str(message["content"])
    found = [at for stop in stops if (at := content.find(stop)) >= 0]
    return {**message, "content": content[: min(found)]} if found else message


def _key(message: Message) -> Hashable:
    """What a message is recognized by when it is sent again.

    Clients may trim an answer, write its calls' arguments anew, and drop its reasoning.
    """
    calls = tuple(
        (call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    role, content = message["role"], message["content"]
    return role, content.strip() if role == "assistant" else content, message.get("tool_call_id"), calls
