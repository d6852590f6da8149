"""The servers of a run: who joins and leaves, and who of them takes which sample.

- A server joins with the next update of the weights: it is among those that `update` lists, and may be sent samples
  once that is done.
- A server is sent a little more than it runs at once, which is less than it could where its KV cache is full; the rest
  waits here, so the oldest work goes first everywhere.
- Samples that share a prefix go to the server that has it: those of a session until it fails, those of a group unless
  it has much more to do than another.
- Samples that go to a server at the same moment go as one HTTP request, but each ends, fails and frees its place alone.
- A server that fails rests for a while and then has to answer something before it is sent a second sample.
- A server that leaves, or does nothing for `stall_s` although it has samples, gives these back as Unavailable. Of one
  that does nothing `hung` is told.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal_like import events
from areal_like.errors import Fault, ServerError
from areal_like.rollout.reading import PARTS, Read, read
from areal_like.rollout.sample import Sample
from areal_like.rollout.sglang.answers import OF_ALL, Piece
from areal_like.rollout.sglang.http import Deadline, Load, Server, Unavailable, encoded
from areal_like.rollout.turns import Turns

AHEAD = 1.25  # times what a server runs at once: what follows is there when a sample ends
TOGETHER = 32  # most samples in one HTTP request; SGLang's work per event grows with them
UNEVEN, SLACK = 1.25, 16  # a server with more samples than this times the least busy one's, and so many, is too busy
LOAD_S = 2.0  # between two questions of how full a server is
FULL = 0.5  # of a KV cache: from here on it says how many sequences it holds
GROWTH = 1.1  # of a server's room from one question to the next, below that
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # of a server that failed; twice as long each time in a row

MOST_GIVEN = 256  # samples that servers are given in one turn of the event loop, each some 10 us of work

type Entry = tuple[Sample, asyncio.Future[None]]


@dataclass(order=True)
class QueueEntry:
    """A sample's place in a queue: the smallest priority is next, then the longest response so far, which may well end
    last and should not begin last too, then the first that came.
    """

    priority: int
    shortness: int
    arrival: int
    near: PrefixAffinity | None = field(compare=False)
    turn: asyncio.Future[ServerState] = field(compare=False)


@dataclass(eq=False)
class ServerState:
    """A server and what is known of it; `in_flight` counts samples, of which `capacity` may be there: 0 until it joins.

    `capacity` is `most`, or less where the KV cache cannot hold that many.
    """

    server: Server
    most: int = 0
    capacity: int = 0
    load: Load | None = None  # what it said last
    in_flight: int = 0
    failures: int = 0  # since it last answered
    backing_off: bool = False
    queue: list[QueueEntry] = field(default_factory=list)  # of those who are bound to it
    outbox: list[Entry] = field(default_factory=list)  # to be sent together
    lost: asyncio.Future[tuple[str, Fault]] = field(default_factory=asyncio.Future)  # why it gives its samples back
    work_done: Any = None
    progressed: float = 0.0  # when it did something, and when it was last asked; on time.monotonic's clock
    asked: float = 0.0

    @property
    def takes(self) -> bool:
        """Whether it may be sent another sample."""
        if self.backing_off or not self.capacity:
            return False
        return not self.in_flight or (not self.failures and self.in_flight < self.capacity)

    def follow(self, load: Load) -> None:
        """Make room for as many samples as the KV cache holds while they are as long as now; where it is rather empty,
        for a few more than before: those that are left may be longer than those that come. Where nothing waits for it,
        as at the end of a step, the few and long that are left say nothing of what is to come.
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
        """Give all samples back, and if it has `left` those too that are on their way to it."""
        if not self.lost.done():
            self.lost.set_result((f"{self.server.name} at {self.server.url} {cause}", fault))
            self.lost = self.lost if fault == "left" else asyncio.Future()


@dataclass(eq=False)
class PrefixAffinity:
    """Samples that share a prefix, and the server that has it; those that are `bound` stay there until it fails."""

    bound: bool = False
    state: ServerState | None = None


class Router:
    """All servers of a run; closed until it is opened for the first time. `version` is the weights' that they hold.

    `read_answer` reads their answers, by default in this process.
    """

    def __init__(self, stall_s: float, read_answer: Read | None = None) -> None:
        self.version = -1
        self.generated = 0  # tokens that servers have answered
        self.waited: list[float] = []  # seconds that samples waited for a server
        self.ran: list[float] = []  # seconds that servers had samples which have ended
        self.on_hold = False  # servers have no memory to generate with
        self.hung: Callable[[Server], object] = lambda server: None
        self._stall_s = stall_s
        self._states: list[ServerState] = []
        self._queue: list[QueueEntry] = []
        self._arrivals = itertools.count()
        self._calls: set[asyncio.Task[None]] = set()
        self._turn = Turns(PARTS)  # to encode and decode
        self._read_answer = read_answer or partial(read, self._turn)
        self._is_open = self._is_stopped = False
        self._excused = 0  # how many have asked for that
        self._idle = asyncio.Event()  # nothing is on its way
        self._idle.set()

    @property
    def servers(self) -> list[Server]:
        """Everybody who has to have the next weights."""
        return [state.server for state in self._states]

    @property
    def serving(self) -> list[Server]:
        """Servers that hold the version, and may be sent samples."""
        return [state.server for state in self._states if state.capacity]

    @property
    def loads(self) -> list[Load]:
        """How full those servers are that have said it."""
        return [state.load for state in self._states if state.load]

    @property
    def busy(self) -> list[Server]:
        """Servers with samples on their way."""
        return [state.server for state in self._states if state.in_flight]

    def join(self, server: Server) -> None:
        """Have a server take part from the next update on."""
        self._states.append(ServerState(server))

    def leave(self, server: Server, why: str = "left the run") -> None:
        """Take a server out at once; its samples go on elsewhere, or end in ServerError where nobody is left."""
        for state in [state for state in self._states if state.server is server]:
            self._states.remove(state)
            for waiter in state.queue:
                heapq.heappush(self._queue, waiter)
            state.lose(why, "left")
            server.leave(why)
        self._dispatch()

    async def close(self, deadline: Deadline) -> None:
        """Send no further sample, and wait for those on their way.

        Raises Unavailable, which names the servers that are late.
        """
        self._is_open = False
        try:
            await asyncio.wait_for(self._idle.wait(), deadline.left)
        except TimeoutError:
            names = ", ".join(server.name for server in self.busy)
            late = f"{names} did not give back the requests in flight within {deadline.seconds:g} s"
            raise Unavailable(late, "late", [server.name for server in self.busy]) from None

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Do not take it for a fault that servers do nothing while the body runs."""
        self._excused += 1
        try:
            yield
        finally:
            self._excused -= 1
            for state in self._states:
                state.progressed = time.monotonic()

    async def open(self, updated: Sequence[Server], deadline: Deadline) -> None:
        """Send samples, from now on also to those who wanted to join and are among those `updated`."""
        for state in [state for state in self._states if not state.capacity and state.server in updated]:
            state.capacity = state.most = math.ceil(AHEAD * await state.server.most_running(deadline.left))
            self._keep(asyncio.create_task(self._follow(state)))
        self._is_open = True
        self._dispatch()

    async def stop(self) -> None:
        """Break off what is still on its way, for good."""
        self._is_stopped = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def generate(self, sample: Sample, priority: int, near: PrefixAffinity | None) -> None:
        """Have a server go on with a sample until it ends; what came of it before a failure is kept.

        Of those that wait the smallest `priority` is next, then the longest. Raises Unavailable, and ServerError
        where a repetition would not help.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[ServerState] = loop.create_future()
        bound = near.state if near and near.bound and near.state in self._states else None
        waiter = QueueEntry(priority, -sample.length, next(self._arrivals), near, turn)
        heapq.heappush(bound.queue if bound else self._queue, waiter)
        self._dispatch()
        came = time.monotonic()
        try:
            state = await turn
            given = time.monotonic()
            self.waited.append(given - came)
            ended: asyncio.Future[None] = loop.create_future()
            if not state.outbox:
                loop.call_soon(self._send, state)
            state.outbox.append((sample, ended))
            await ended
            self.ran.append(time.monotonic() - given)
        except Unavailable as error:
            if error.fault != "client":
                self._back_off(state)
                if near and near.state is state:
                    near.state = None
            raise
        finally:
            self._leave(turn)

    def _leave(self, turn: asyncio.Future[ServerState]) -> None:
        """A sample has ended; give its place, if it had one, to the next."""
        if turn.done() and not turn.cancelled() and not turn.exception():
            state = turn.result()
            state.in_flight -= 1
            if not state.in_flight:
                events.turn(state.server.name, None)
        if not any(state.in_flight for state in self._states):
            self._idle.set()
        self._dispatch()

    def _dispatch(self) -> None:
        for _ in range(MOST_GIVEN):
            if not self._is_open or not self._states:
                break
            waiting = _head(self._queue)
            free = [state for state in self._states if state.takes and (waiting or _head(state.queue))]
            if not free:
                return
            state = min(free, key=lambda state: state.in_flight)
            own = _head(state.queue)
            if own and not (waiting and waiting < own):
                self._give(heapq.heappop(state.queue), state)
            else:
                near = waiting.near and waiting.near.state if waiting else None
                if near in free and near.in_flight <= UNEVEN * state.in_flight + SLACK:
                    state = near
                self._give(heapq.heappop(self._queue), state)
        else:
            asyncio.get_running_loop().call_soon(self._dispatch)
        if not self._states:
            while (waiter := _head(self._queue)) is not None:
                waiter.turn.set_exception(ServerError("no server is left"))

    def _give(self, waiter: QueueEntry, state: ServerState) -> None:
        if waiter.near:
            waiter.near.state = state
        if not state.in_flight:
            state.progressed = time.monotonic()
            if not self.on_hold:
                events.turn(state.server.name, "generating")
        state.in_flight += 1
        self._idle.clear()
        waiter.turn.set_result(state)

    def _send(self, state: ServerState) -> None:
        entries, state.outbox = [entry for entry in state.outbox if not entry[1].done()], []
        for start in range(0, len(entries), TOGETHER):
            self._keep(asyncio.create_task(self._call(state, entries[start : start + TOGETHER])))

    async def _call(self, state: ServerState, entries: Sequence[Entry]) -> None:
        """Have a server generate as long as it does anything; every entry ends, or has an exception."""
        lost = state.lost
        error: ServerError = Unavailable(f"{state.server.name} ended its answer early", "half_answer")
        reading = asyncio.ensure_future(self._read(state, entries))
        try:
            while not reading.done():
                if lost.done():
                    raise Unavailable(*lost.result())
                await self._look_after(state)
                await asyncio.wait((reading, lost), timeout=self._stall_s / 4, return_when=asyncio.FIRST_COMPLETED)
            reading.result()
        except ServerError as failure:
            error = failure
        finally:
            reading.cancel()
            left = [entry for entry in entries if not entry[1].done()]
            if len(entries) > 1 and not isinstance(error, Unavailable):  # what is wrong may be one of them alone
                for entry in left:
                    self._keep(asyncio.create_task(self._call(state, [entry])))
            else:
                for _, ended in left:
                    ended.set_exception(copy(error))

    async def _read(self, state: ServerState, entries: Sequence[Entry]) -> None:
        await self._turn()
        entries = [entry for entry in entries if not entry[1].done()]  # some were cancelled meanwhile
        if not entries:
            return
        first, name = self.version, state.server.name
        rids = [f"{next(self._arrivals)}-{name}" for _ in entries]
        body = {
            "rid": rids,
            "input_ids": [sample.input for sample, _ in entries],
            "sampling_params": [sample.params for sample, _ in entries],
            "return_logprob": True,
            "stream": True,
        }
        async with aclosing(self._read_answer(state.server, encoded(body))) as answer:
            await anext(answer)  # from now on what nobody waits for can be aborted
            for rid, (_, ended) in zip(rids, entries, strict=True):
                ended.add_done_callback(partial(self._abort_cancelled, state, rid))
            async for parts in answer:
                state.progressed = time.monotonic()
                for place, piece in parts:
                    self._take(state, entries, place, piece, first)

    def _take(
        self, state: ServerState, entries: Sequence[Entry], place: int, piece: Piece | ServerError, first: int
    ) -> None:
        """Give a sample what came of it; raises ServerError where that is about all of them, or about none."""
        if place == OF_ALL and isinstance(piece, ServerError):
            raise piece
        if place >= len(entries):
            told = f"{state.server.name} gave an answer that cannot be used: an event about input {place}"
            raise Unavailable(told, "unusable")
        sample, ended = entries[place]
        if not ended.done():
            self._extend(state, sample, ended, piece, first)

    def _extend(
        self, state: ServerState, sample: Sample, ended: asyncio.Future[None], piece: Piece | ServerError, first: int
    ) -> None:
        try:
            if isinstance(piece, ServerError):
                raise piece
            self.generated += sample.extend(piece, state.server.name, first, self.version)
        except ServerError as error:
            ended.set_exception(error)
            return
        if sample.finish_reason is not None:
            ended.set_result(None)
        if state.failures:
            state.failures = 0
            self._dispatch()

    def _abort_cancelled(self, state: ServerState, rid: str, ended: asyncio.Future[None]) -> None:
        """Tell the server of a sample that nobody waits for any more."""

        async def tell() -> None:
            with suppress(ServerError):
                await state.server.post("/abort_request", {"rid": rid}, self._stall_s)

        if ended.cancelled() and not self._is_stopped:
            self._keep(asyncio.create_task(tell()))

    def _keep(self, call: asyncio.Task[None]) -> None:
        """Hold a task that nobody waits for until it ends."""
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _back_off(self, state: ServerState) -> None:
        if state.backing_off:  # samples that fail together are one failure
            return
        pause = min(PAUSE_S * 2 ** min(state.failures, 32), LONGEST_PAUSE_S)  # 2**1024 is more than a float
        state.backing_off = True
        state.failures += 1

        def rested() -> None:
            state.backing_off = False
            self._dispatch()

        asyncio.get_running_loop().call_later(pause, rested)

    async def _follow(self, state: ServerState) -> None:
        """Ask a server now and then how full it is, as long as it has samples."""
        while state in self._states:
            await asyncio.sleep(LOAD_S)
            if state.in_flight and not self._excused:
                with suppress(ServerError):
                    state.follow(await state.server.load(LOAD_S))
                    self._dispatch()

    async def _look_after(self, state: ServerState) -> None:
        """Ask a server that has not answered for long what it has done meanwhile, once for all of its samples."""
        now, pause = time.monotonic(), self._stall_s / 4
        if self._excused or now - max(state.progressed, state.asked) < pause:
            return
        state.asked = now
        with suppress(ServerError):
            done = await state.server.work_done(pause)
            if done != state.work_done:
                state.work_done, state.progressed = done, time.monotonic()
        now = time.monotonic()
        if not self._excused and state in self._states and now - state.progressed >= self._stall_s:
            state.progressed = now  # others may have asked meanwhile
            state.lose(f"did nothing for {self._stall_s:g} s (rollout.request_timeout_s)", "stalled")
            self.hung(state.server)


def _head(queue: list[QueueEntry]) -> QueueEntry | None:
    """The next waiter of a queue; those whose owners have gone, or were told, are taken out."""
    while queue and queue[0].turn.done():
        heapq.heappop(queue)
    return queue[0] if queue else None
