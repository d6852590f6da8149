"""Chooses the server of each waiting sample: bookkeeping without I/O, of O(log n) per event.

The least busy server that may take a sample gets one: the first of its own queue or of the common one, whichever comes
first. A sample of the common queue with a prefix affinity goes to the server that has its prefix instead, unless that
one has no capacity, or has much more to do. The smallest priority comes first, then the longest response so far, which
may well end last and should not begin last too, then the first arrival.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from areal_like.errors import Fault
from areal_like.rollout.sample import Sample
from areal_like.rollout.server import Load, Server

AHEAD = 1.25  # times the samples that a server runs at once: the next sample is there when one ends
FULL = 0.5  # share of a KV cache from which on its use says how many sequences it holds
GROWTH = 1.1  # of a server's capacity from one report to the next, while its KV cache is emptier than that

UNEVEN, SLACK = 1.25, 16  # a server with more samples than this times the least busy one's, and so many, is too busy


type Queued = tuple[int, int, int, QueueEntry]  # priority, minus the length so far, arrival; no two arrivals are equal
type Outgoing = tuple[Sample, asyncio.Future[None]]
type Loss = tuple[str, Fault]  # why a server gives its samples back


@dataclass(eq=False)
class ServerState:
    """A server's load; `in_flight` counts samples, at most `capacity`: 0 until it holds weights.

    `capacity` is `most`, or less where the KV cache cannot hold that many. `number` is its place in the order in which
    servers joined.
    """

    server: Server
    number: int = 0
    is_here: bool = True  # until it leaves
    most: int = 0
    capacity: int = 0
    load: Load | None = None  # its last report
    in_flight: int = 0
    failures: int = 0  # since its last answer
    backing_off: bool = False
    queue: list[Queued] = field(default_factory=list)  # a heap of the samples that are bound to it
    outbox: list[Outgoing] = field(default_factory=list)  # to be sent together
    _left: Loss | None = None
    _watches: set[asyncio.Future[Loss]] = field(default_factory=set)
    work_done: Any = None
    progressed: float = 0.0  # time of its last progress, and of the last question; on time.monotonic's clock
    asked: float = 0.0

    @property
    def takes(self) -> bool:
        """Whether it may be sent another sample."""
        if self.backing_off or not self.capacity or not self.is_here:
            return False
        return not self.in_flight or (not self.failures and self.in_flight < self.capacity)

    def follow(self, load: Load) -> None:
        """Set the capacity to as many samples as the KV cache holds while they are as long as now.

        Where the cache is rather empty, the capacity grows a little: the samples that are left may be longer than the
        next ones. Where nothing waits, as at the end of a step, the few and long samples that are left predict nothing.
        """
        self.load = load
        if load.kv_use < FULL:
            capacity = self.capacity * GROWTH
        elif self.in_flight < self.capacity and not load.waiting:
            return
        else:
            capacity = max(AHEAD * (load.running if load.waiting else load.running / load.kv_use), self.capacity / 2)
        self.capacity = max(1, min(self.most, math.ceil(capacity)))

    def lose(self, cause: str, fault: Fault) -> None:
        """Return all samples, and if it has `left` also the samples on their way to it."""
        if self._left:
            return
        loss = (f"{self.server.name} at {self.server.url} {cause}", fault)
        self._left = loss if fault == "left" else None
        for watch in self._watches:
            if not watch.done():
                watch.set_result(loss)

    @contextmanager
    def watch_loss(self) -> Iterator[asyncio.Future[Loss]]:
        """Yield a future that is set when the server gives its samples back while the body runs.

        Each request has its own: asyncio searches all callbacks of a future to remove one.
        """
        watch: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        if self._left:
            watch.set_result(self._left)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)


@dataclass(eq=False)
class PrefixAffinity:
    """Samples that share a prefix, and the server that has it; `bound` ones stay there until it fails."""

    bound: bool = False
    state: ServerState | None = None


@dataclass(eq=False)
class QueueEntry:
    """A sample that waits for its `turn`: the server that it is given to. Its owner may cancel that."""

    turn: asyncio.Future[ServerState]
    affinity: PrefixAffinity | None = None


class LeastBusy:
    """The least busy of the servers that are `eligible`, the first to join among equals.

    Each has an entry for the samples that it has now, if it is eligible; entries that are outdated stay until they are
    met, or are more than the others.
    """

    def __init__(self, states: dict[int, ServerState], eligible: Callable[[ServerState], bool]) -> None:
        self._states = states
        self._eligible = eligible
        self._heap: list[tuple[int, int]] = []  # samples in flight and number

    def update(self, state: ServerState) -> None:
        """Note a server that became eligible, or has another number of samples."""
        heapq.heappush(self._heap, (state.in_flight, state.number))
        if len(self._heap) > 64 + 4 * len(self._states):
            self._heap = [(state.in_flight, state.number) for state in self._states.values() if self._eligible(state)]
            heapq.heapify(self._heap)

    def first(self) -> ServerState | None:
        """Return the least busy server, or None where none is eligible."""
        while self._heap:
            in_flight, number = self._heap[0]
            state = self._states.get(number)
            if state and state.in_flight == in_flight and self._eligible(state):
                return state
            heapq.heappop(self._heap)
        return None


@dataclass(eq=False)
class Dispatch:
    """All servers of a run and the samples that wait for them; `in_flight` counts the samples that servers have.

    Call `update` after changing a state directly.
    """

    states: dict[int, ServerState] = field(default_factory=dict)  # in the order of joining
    in_flight: int = 0
    _joined: int = 0
    _arrived: int = 0
    _queue: list[Queued] = field(default_factory=list)  # a heap of the samples that are not bound to a server

    def __post_init__(self) -> None:
        self._free = LeastBusy(self.states, lambda state: state.takes)
        self._free_with_queue = LeastBusy(self.states, lambda state: state.takes and _head(state.queue) is not None)

    def join(self, server: Server) -> ServerState:
        """Add a server."""
        state = self.states[self._joined] = ServerState(server, self._joined)
        self._joined += 1
        return state

    def leave(self, state: ServerState) -> None:
        """Remove a server; its waiting samples go to any other."""
        del self.states[state.number]
        state.is_here = False
        self.in_flight -= state.in_flight
        for queued in state.queue:
            heapq.heappush(self._queue, queued)
        state.queue.clear()

    def update(self, state: ServerState) -> None:
        """Note that a server's state has changed."""
        if state.takes:
            self._free.update(state)
            if state.queue:
                self._free_with_queue.update(state)

    def wait(self, entry: QueueEntry, priority: int = 0, length: int = 0) -> None:
        """Queue a sample of so many tokens for its server, or for any server."""
        affinity = entry.affinity
        queued = (priority, -length, self._arrived, entry)
        self._arrived += 1
        bound = affinity.state if affinity and affinity.bound else None
        if bound and bound.is_here:
            heapq.heappush(bound.queue, queued)
            self.update(bound)
        else:
            heapq.heappush(self._queue, queued)

    def next(self) -> ServerState | None:
        """Give the next sample to a server, and return that; None while all have to wait."""
        anyones = _head(self._queue)
        state = (self._free if anyones else self._free_with_queue).first()
        if state is None:
            return None
        own = _head(state.queue)
        if own and not (anyones and anyones < own):
            heapq.heappop(state.queue)
            return self._give(own[-1], state)
        assert anyones is not None  # as the server has no queue then
        heapq.heappop(self._queue)
        entry = anyones[-1]
        near = entry.affinity.state if entry.affinity else None
        if near and near.takes and near.in_flight <= UNEVEN * state.in_flight + SLACK:
            state = near
        return self._give(entry, state)

    def _give(self, entry: QueueEntry, state: ServerState) -> ServerState:
        entry.turn.set_result(state)
        if entry.affinity:
            entry.affinity.state = state
        state.in_flight += 1
        self.in_flight += 1
        self.update(state)
        return state

    def release(self, state: ServerState) -> None:
        """Release the place of a sample on a server."""
        state.in_flight -= 1
        if state.is_here:
            self.in_flight -= 1
            self.update(state)

    def abandon(self) -> Iterator[QueueEntry]:
        """Remove all samples that wait for any server."""
        while (queued := _head(self._queue)) is not None:
            heapq.heappop(self._queue)
            yield queued[-1]


def _head(queue: list[Queued]) -> Queued | None:
    """Return the first sample of a queue; remove cancelled ones."""
    while queue and queue[0][-1].turn.done():
        heapq.heappop(queue)
    return queue[0] if queue else None
