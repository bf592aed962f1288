"""Which request sits in which slot of the KV cache, and what the next step forwards. Owned by one thread."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from torch import Tensor

from envgrad.sampling.kv_cache import SlotMemory, StepRow, Usual
from envgrad.sampling.requests import (
    Request,
    SamplerStats,
    SharedPrefix,
    Slot,
    common_prefix,
    leads,
    least_needed,
)
from envgrad.sampling.sampler import Session

_ROUND = 32
_KEPT_HEADS = 64
_WORTH_WAITING = 16
"""tokens that a sibling's running prefill must save before another request waits a step for it"""


class PlannedRow(NamedTuple):
    """A slot's part in the next step; ``complete`` if its last token needs logits. (A tuple: made per row and step.)"""

    slot: Slot
    request: Request
    row: StepRow
    complete: bool


class Scheduler:
    """Slots, waiting requests and the plan of the next step.

    Sessions keep their slot between turns. A waiting request takes, in this order: a free slot that holds its group's
    prompt, a free slot of a finished group, a new slot, any free slot, that of the session longest away.

    Example:
        >>> from envgrad.sampling.kv_cache import KVCache
        >>> from envgrad.sampling.sampler import SamplingParams
        >>> scheduler = Scheduler(KVCache(), SamplerStats(), max_sessions=2, max_context=64, max_kv_tokens=None)
        >>> session = Session(key="a", group="g", order=(0,))
        >>> scheduler.begin(session)
        >>> scheduler.add(Request.of([1, 2, 3], SamplingParams(max_tokens=4), session, max_context=64))
        >>> scheduler.admit(now=0.0, patience=0.0)
        >>> [(one.row.start, one.row.size, one.complete) for one in scheduler.plan(budget=2)]
        [(0, 2, False)]
    """

    def __init__(
        self, cache: SlotMemory, stats: SamplerStats, *, max_sessions: int, max_context: int, max_kv_tokens: int | None
    ) -> None:
        self.cache = cache
        self.stats = stats
        self.slots: list[Slot] = []
        self.waiting: list[Request] = []
        self._max_sessions = max_sessions
        self._max_context = max_context
        self._max_kv_tokens = max_kv_tokens
        self._by_key: dict[str, Slot] = {}
        self._by_group: dict[str, list[Slot]] = {}
        self._open_groups: Counter[str] = Counter()
        self._heads: OrderedDict[str, tuple[list[int], Tensor]] = OrderedDict()
        self._evicted: dict[str, int] = {}
        self._followers: dict[Request, list[Slot]] = {}
        self._last_prefix = 0
        self._free: dict[Slot, None] = {}
        """slots without a session"""
        self._busy: dict[Slot, None] = {}
        """slots with a request"""
        self.changes = 0
        """grows whenever another request is in a slot, or a slot is elsewhere: until then the next step is the last
        one, each row a token further"""
        self._usual = Usual()
        self.ready: dict[Request, Tensor] = {}
        """requests whose whole prompt was copied from siblings, with the logits of its last position"""

    # -- sessions and requests ----------------------------------------------------------------------------------------

    def begin(self, session: Session) -> None:
        self._open_groups[session.group] += 1

    def end(self, session: Session) -> None:
        """The session asks no more. Its slot is free, and keeps its content until it is taken."""
        self._open_groups[session.group] -= 1
        if self._open_groups[session.group] <= 0:
            del self._open_groups[session.group]
            self._heads.pop(session.group, None)
        self._evicted.pop(session.key, None)
        slot = self._by_key.pop(session.key, None)
        if slot is not None:
            if slot.request is not None:
                self._release(slot)
            slot.session = None
            self._free[slot] = None
        if self.waiting:
            self.waiting = [one for one in self.waiting if one.session.key != session.key]

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Nobody waits for this answer any more; the session may go on."""
        self.waiting = [one for one in self.waiting if one is not request]
        slot = self._by_key.get(request.session.key)
        if slot is not None and slot.request is request:
            self._release(slot)

    def busy(self) -> list[Slot]:
        """Slots with a request, by index."""
        return sorted(self._busy, key=_index)

    def slot_of(self, request: Request) -> Slot:
        """The slot that serves ``request``, which must have one."""
        return self._by_key[request.session.key]

    def requests(self) -> list[Request]:
        return [slot.request for slot in self.busy() if slot.request is not None] + self.waiting

    @property
    def num_requests(self) -> int:
        return len(self._busy) + len(self.waiting)

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or bool(self._busy)

    def finish(self, slot: Slot, now: float) -> None:
        """The slot's request is answered; its session goes away and may come back."""
        self.changes += 1
        slot.request = None
        self._busy.pop(slot, None)
        slot.idle_since = now
        slot.used = self.stats.steps

    def drop_kv(self) -> None:
        """Forget all keys, values and logits (the weights have changed); running requests start over."""
        for slot in self.busy():
            self._requeue(slot)
        if self.cache.slots and self._max_kv_tokens is None:
            self._usual = Usual.of(self.cache, max((one.cached for one in self.slots), default=0))
        self._free.clear()
        self._by_key.clear()
        self._by_group.clear()
        self.slots.clear()
        self._heads.clear()
        self.cache.drop()

    def _release(self, slot: Slot) -> None:
        self.changes += 1
        request, slot.request = slot.request, None
        self._busy.pop(slot, None)
        if request is None:
            return
        self.ready.pop(request, None)
        if request.leader is not None:
            if request.leader in self._followers:
                self._followers[request.leader].remove(slot)
            request.leader = None
        for one in self._followers.pop(request, []):
            self._requeue(one)

    def _requeue(self, slot: Slot) -> None:
        request = slot.request
        if request is not None:
            self._release(slot)
            self.waiting.append(request)

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, *, now: float, patience: float) -> None:
        """Give slots to waiting requests, in session order; sessions that kept theirs never wait.

        ``patience``: seconds for which a session may be away before its slot can be taken while others decode.
        """
        if not self.waiting:
            return
        self.waiting.sort(key=lambda one: one.session.order)
        if self.cache.length == 0:
            longest = max(len(one.tokens) + min(one.limit - len(one.tokens), 64) for one in self.waiting)
            rows = min(self._max_sessions, self._open_groups.total())
            self.cache.resize(0, self._rounded(max(longest, self._usual.length_for(rows))))
        left: list[Request] = []
        full = False
        for request in self.waiting:
            slot = self._by_key.get(request.session.key)
            kept = slot is not None
            if slot is None and not full and not self._should_defer(request):
                slot = self._take_slot(request, now, patience)
                full = slot is None
            if slot is None:
                left.append(request)
            else:
                self._start(request, slot, kept)
        self.waiting = left

    def _take_slot(self, request: Request, now: float, patience: float) -> Slot | None:
        free = self._free
        siblings = self._by_group.get(request.group, []) if free else []
        shared = [slot for slot in siblings if slot.free and slot.common(request.tokens)]
        spent = [slot for slot in free if slot.group not in self._open_groups]
        if shared:
            slot = max(shared, key=lambda one: (one.common(request.tokens), -one.index))
        elif spent:
            slot = min(spent, key=lambda one: (one.used, one.index))
        elif len(self.slots) < self._limit(self.cache.length):
            slot = Slot(index=len(self.slots))
            self.slots.append(slot)
            if len(self.slots) > self.cache.slots:
                wanted = len(self.slots) + len(self.waiting)
                room = min(self._limit(self.cache.length), max(8, wanted, self.cache.slots * 3 // 2))
                self.cache.resize(max(room, len(self.slots)), self.cache.length)
        elif free:
            slot = min(free, key=lambda one: (one.used, one.index))
        else:
            nobody = not self._busy
            away = [one for one in self.slots if one.idle and (nobody or now - one.idle_since > patience)]
            if not away:
                return None
            slot = min(away, key=lambda one: (one.used, one.index))
            self._evict(slot)
        slot.session = request.session
        self._free.pop(slot, None)
        self._by_key[request.session.key] = slot
        return slot

    def _evict(self, slot: Slot) -> None:
        if slot.session is not None:
            self._evicted[slot.session.key] = slot.cached
            self._by_key.pop(slot.session.key, None)
            slot.session = None
            self._free[slot] = None
            self.stats.evictions += 1

    def _should_defer(self, request: Request) -> bool:
        """Whether a sibling is about to compute a good part of this prompt, though not all of it."""
        siblings = self._by_group.get(request.group, [])
        known = max((one.common(request.tokens) for one in siblings), default=0)
        for slot in siblings:
            other = slot.request
            if other is None or other.leader is not None or other.tokens == request.tokens:
                continue
            shared = common_prefix(other.tokens, request.tokens, min(len(other.tokens), len(request.tokens)))
            if min(shared, len(request.tokens) - 1) > known + _WORTH_WAITING:
                return True
        return False

    def _start(self, request: Request, slot: Slot, kept: bool) -> None:
        """Put the request into its slot with as many cached tokens as the slot, or a sibling's, can give."""
        self.changes += 1
        tokens = request.tokens
        cached = slot.common(tokens)
        slot.request, slot.used = request, self.stats.steps
        if slot.prefix is not None and slot.prefix.length > cached:
            slot.prefix = None
        self._busy[slot] = None
        if not kept or not slot.cached:
            self._join_group(slot, request.group)
            siblings = [one for one in self._by_group[request.group] if one is not slot]
            leader = next((one.request for one in siblings if leads(one, request)), None)
            source = max(siblings, key=lambda one: (one.common(tokens), -one.index), default=None)
            if leader is not None and cached < len(tokens) - 1:
                request.leader = leader
                self._followers.setdefault(leader, []).append(slot)
            elif source is not None and source.common(tokens) > cached:
                cached = self._copy(source, slot, source.common(tokens))
            head = self._heads.get(request.group)
            if head is not None and cached == len(tokens) and head[0] == tokens:
                self.ready[request] = head[1]
            forgotten = min(self._evicted.pop(request.session.key, 0), len(tokens) - 1) - cached
            if request.leader is None:
                self.stats.recomputed_tokens += max(0, forgotten)
        slot.tokens = tokens
        slot.cached = cached if request in self.ready else min(cached, len(tokens) - 1)

    def _join_group(self, slot: Slot, group: str) -> None:
        self._leave_group(slot)
        slot.group = group
        self._by_group.setdefault(group, []).append(slot)

    def _leave_group(self, slot: Slot) -> None:
        members = self._by_group.get(slot.group, [])
        if slot in members:
            members.remove(slot)
            if not members:
                del self._by_group[slot.group]

    def _copy(self, source: Slot, target: Slot, count: int) -> int:
        self.cache.copy(source.index, [target.index], count)
        self.stats.copied_tokens += count
        if source.prefix is None or source.prefix.length > count:
            source.prefix = self._new_prefix(count)
        target.prefix = source.prefix
        return count

    def _new_prefix(self, length: int) -> SharedPrefix:
        self._last_prefix += 1
        return SharedPrefix(self._last_prefix, length)

    # -- after a forward ----------------------------------------------------------------------------------------------

    def keep_head(self, request: Request, logits: Tensor) -> None:
        """Remember the logits (V,) of a group's prompt for siblings that come later."""
        if request.group not in self._heads:
            self._heads[request.group] = (list(request.tokens), logits.clone())
            if len(self._heads) > _KEPT_HEADS:
                self._heads.popitem(last=False)

    def release_followers(self, leader: Slot) -> list[Slot]:
        """Copy the leader's row to the siblings that waited for it; they can be sampled from its logits."""
        if not self._followers:
            return []
        slots = self._followers.pop(leader.request, []) if leader.request is not None else []
        count = leader.cached
        if slots:
            self.cache.copy(leader.index, [one.index for one in slots], count)
            self.stats.copied_tokens += count * len(slots)
            leader.prefix = self._new_prefix(count)
        for slot in slots:
            slot.cached, slot.prefix = count, leader.prefix
            if slot.request is not None:
                slot.request.leader = None
        return slots

    # -- the next step ------------------------------------------------------------------------------------------------

    def plan(self, budget: int) -> list[PlannedRow]:
        """What to forward next: one token of every decoding row, and up to ``budget`` tokens of prompts and suffixes.

        Rows come in slot order, decoding ones first. Slots can be lost here when a row grows and ``max_kv_tokens`` has
        no room left: the requests of latest order go back to wait.
        """
        while True:
            rows = self._rows(budget)
            need = max((start + size for _, _, (_, start, size), _ in rows), default=0)
            if need <= self.cache.length:
                return rows
            self._grow(need)

    def _rows(self, budget: int) -> list[PlannedRow]:
        decoding: list[PlannedRow] = []
        longer: list[tuple[tuple[int, ...], Slot, Request, int]] = []
        for slot in self.busy():
            request = slot.request
            if request is None:
                continue
            size = len(request.tokens) - slot.cached
            if size == 1:
                decoding.append(PlannedRow(slot, request, StepRow(slot.index, slot.cached, 1), True))
            elif request.leader is None and request not in self.ready:
                longer.append((request.session.order, slot, request, size))
        longer.sort(key=lambda one: (one[0], one[1].index))
        chunks: list[PlannedRow] = []
        for _, slot, request, size in longer:
            if budget < 1:
                break
            row = StepRow(slot.index, slot.cached, min(size, budget))
            chunks.append(PlannedRow(slot, request, row, row.size == size))
            budget -= row.size
        chunks.sort(key=lambda one: one.row.slot)
        return decoding + chunks

    def _grow(self, need: int) -> None:
        """Lengthen all slots; where the budget of tokens does not allow as many, give up some."""
        self.changes += 1
        length = min(self._max_context, max(self._rounded(need), 2 * self.cache.length))
        if len(self.slots) > self._limit(length):
            length = self._rounded(need)
        excess = len(self.slots) - self._limit(length)
        for slot in sorted(self.slots, key=least_needed)[: max(0, excess)]:
            self._requeue(slot)
            self._evict(slot)
            self.slots.remove(slot)
            self._free.pop(slot, None)
            self._leave_group(slot)
        room = min(self._limit(length), max(self.cache.slots, len(self.slots)))
        self.cache.resize(room, length, keep=[slot.index for slot in self.slots])
        for index, slot in enumerate(self.slots):
            slot.index = index

    def _limit(self, length: int) -> int:
        if self._max_kv_tokens is None:
            return self._max_sessions
        return max(1, min(self._max_sessions, self._max_kv_tokens // max(1, length)))

    def _rounded(self, length: int) -> int:
        return min(self._max_context, -(-length // _ROUND) * _ROUND)


def _index(slot: Slot) -> int:
    return slot.index
