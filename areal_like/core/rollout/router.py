"""The servers of a run as they join and leave, and the path of each sample to its server and back.

- A server joins with the next update of the weights: `update` lists it, and it receives samples after the update.
- `dispatch.py` decides which server takes which sample. A server is sent a little more than it runs at once, which is
  less than it could where its KV cache is full; the rest waits here, so the oldest work goes first everywhere.
- Samples that go to a server at the same moment go as one HTTP request, but each ends, fails and frees its place alone.
- A server that fails gets nothing for a while, and then has to answer something before it is sent a second sample.
- A server that leaves, or does nothing for `stall_s` although it has samples, gives these back as Unavailable. A server
  that does nothing is reported to `hung`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any

from areal_like.core import events
from areal_like.core.errors import ServerError
from areal_like.core.rollout.dispatch import AHEAD, Dispatch, Outgoing, PrefixAffinity, QueueEntry, ServerState
from areal_like.core.rollout.http import Deadline, Unavailable
from areal_like.core.rollout.sample import Sample
from areal_like.core.rollout.server import OF_ALL, Generation, Load, Part, Server
from areal_like.core.rollout.turns import Turns
from areal_like.core.types import Piece

TOGETHER = 32  # most samples in one HTTP request; SGLang's work per event grows with them
LOAD_S = 2.0  # between two questions of how full a server is
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # of a server that failed; twice as long each time in a row

DRAIN_LOOKS = 4  # at the servers' progress, within the time limit of a drain
MOST_GIVEN = 256  # samples that servers are given in one turn of the event loop, each some 10 us of work


class Router:
    """All servers of a run; closed until it is opened for the first time. `version` is the weights' that they hold."""

    def __init__(self, stall_s: float) -> None:
        self.version = -1
        self.generated = 0  # tokens that servers have answered
        self.waited: list[float] = []  # seconds that samples waited for a server
        self.ran: list[float] = []  # seconds that servers had samples which have ended
        self.on_hold = False  # servers have no memory to generate with
        self.hung: Callable[[Server], object] = lambda server: None
        self._stall_s = stall_s
        self._dispatch = Dispatch()
        self._is_giving = False  # some more in the next turn of the event loop
        # SGLang aborts the ids of a stream two seconds after its end, so another run on the server needs other ids.
        self._own, self._numbers = secrets.token_hex(4), itertools.count()
        self._calls: set[asyncio.Task[None]] = set()
        self._given: dict[asyncio.Future[ServerState], float] = {}  # times of samples that are on servers
        self._turn = Turns(PARTS)  # to encode and decode
        self._is_open = self._is_stopped = False
        self._excused = 0  # how many have asked for that
        self._idle = asyncio.Event()  # nothing is on its way
        self._idle.set()

    @property
    def _states(self) -> list[ServerState]:
        return list(self._dispatch.states.values())

    @property
    def servers(self) -> list[Server]:
        """Servers that must receive the next weights."""
        return [state.server for state in self._states]

    @property
    def serving(self) -> list[Server]:
        """Servers that hold the version and receive samples."""
        return [state.server for state in self._states if state.capacity]

    @property
    def loads(self) -> list[Load]:
        """Load of the servers that have reported it."""
        return [state.load for state in self._states if state.load]

    @property
    def busy(self) -> list[Server]:
        """Servers with samples in flight."""
        return [state.server for state in self._states if state.in_flight]

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest of the samples in flight was given to its server."""
        present = time.monotonic()
        return present - next(iter(self._given.values()), present)

    def join(self, server: Server) -> None:
        """Add a server from the next update on."""
        self._dispatch.join(server)

    def leave(self, server: Server, why: str = "left the run") -> None:
        """Remove a server at once; its samples continue on other servers, or end in ServerError without any."""
        for state in [state for state in self._states if state.server is server]:
            self._dispatch.leave(state)
            state.lose(why, "left")
            server.leave(why)
        self._give()

    async def close(self, deadline: Deadline) -> None:
        """Send no further sample, and wait for samples on their way as long as servers make progress.

        The deadline is renewed with the progress. Raises Unavailable, which names the servers that made none.
        """
        self._is_open = False
        before: Mapping[Any, Any] = {}
        while not self._idle.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), deadline.seconds / DRAIN_LOOKS)
            now = await self._progress(before, deadline.seconds / DRAIN_LOOKS)
            if now != before or self._idle.is_set():
                before = now
                deadline.renew()
            elif deadline.passed:
                raise _not_drained(self.busy, deadline)

    async def _progress(self, before: Mapping[Any, Any], limit_s: float) -> Mapping[Any, Any]:
        """Return counters that change with any work of the servers; a silent server keeps its value of `before`."""

        async def ask(server: Server) -> Any:
            with suppress(ServerError):
                return await server.work_done(limit_s)
            return before.get(server)

        busy = self.busy
        done = await asyncio.gather(*map(ask, busy))
        return dict(zip(busy, done, strict=True)) | {"tokens": self.generated, "samples": self._dispatch.in_flight}

    @contextmanager
    def excuse(self) -> Iterator[None]:
        """Do not treat idle servers as faulty while the body runs."""
        self._excused += 1
        try:
            yield
        finally:
            self._excused -= 1
            for state in self._states:
                state.progressed = time.monotonic()

    async def open(self, updated: Sequence[Server], deadline: Deadline) -> None:
        """Send samples, from now on also to joining servers that are among the `updated` ones."""
        new = [state for state in self._states if not state.capacity and state.server in updated]
        most = await asyncio.gather(*(state.server.most_running(deadline.left) for state in new))
        for state, running in zip(new, most, strict=True):
            state.capacity = state.most = math.ceil(AHEAD * running)
            self._dispatch.update(state)
            self._keep(asyncio.create_task(self._follow(state)))
        self._is_open = True
        self._give()

    async def stop(self) -> None:
        """Cancel all requests in flight, for good."""
        self._is_stopped = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def generate(self, sample: Sample, priority: int, affinity: PrefixAffinity | None) -> None:
        """Continue a sample on a server until it ends; the tokens before a failure are kept.

        Among waiting samples the smallest `priority` is next, then the longest. Raises Unavailable, and ServerError
        where a repetition would not help.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[ServerState] = loop.create_future()
        self._dispatch.wait(QueueEntry(turn, affinity), priority, sample.length)
        self._give()
        came = time.monotonic()
        try:
            state = await turn
            given = self._given[turn] = time.monotonic()
            self.waited.append(given - came)
            ended: asyncio.Future[None] = loop.create_future()
            if not state.outbox:
                loop.call_soon(self._send, state)
            state.outbox.append((sample, ended))
            await ended
            self.ran.append(time.monotonic() - given)
        except Unavailable:
            self._back_off(state)
            if affinity and affinity.state is state:
                affinity.state = None
            raise
        finally:
            self._free(turn)

    def _free(self, turn: asyncio.Future[ServerState]) -> None:
        """Give the place of an ended sample, if it had one, to the next."""
        self._given.pop(turn, None)
        if turn.done() and not turn.cancelled() and not turn.exception():
            state = turn.result()
            self._dispatch.release(state)
            if not state.in_flight:
                events.turn(state.server.name, None)
        if not self._dispatch.in_flight:
            self._idle.set()
        self._give()

    def _give(self) -> None:
        """Assign samples to servers with capacity, at most MOST_GIVEN in one turn of the event loop."""
        if self._is_giving:
            return
        for _ in range(MOST_GIVEN):
            if not self._is_open or (state := self._dispatch.next()) is None:
                break
            self._note_sample(state)
        else:
            self._is_giving = True
            asyncio.get_running_loop().call_soon(self._give_more)
        if not self._dispatch.states:
            for entry in self._dispatch.abandon():
                entry.turn.set_exception(ServerError("no server is left"))

    def _give_more(self) -> None:
        self._is_giving = False
        self._give()

    def _note_sample(self, state: ServerState) -> None:
        if state.in_flight == 1:
            state.progressed = time.monotonic()
            if not self.on_hold:
                events.turn(state.server.name, "generating")
        self._idle.clear()

    def _send(self, state: ServerState) -> None:
        entries, state.outbox = [entry for entry in state.outbox if not entry[1].done()], []
        for alike in _by_columns(entries):
            for together in itertools.batched(alike, TOGETHER):
                self._keep(asyncio.create_task(self._call(state, together)))

    async def _call(self, state: ServerState, entries: Sequence[Outgoing]) -> None:
        """Generate on a server as long as it makes progress; every entry ends or has an exception."""
        error: ServerError = Unavailable(f"{state.server.name} ended its answer early", "half_answer")
        reading = asyncio.ensure_future(self._read(state, entries))
        try:
            with state.watch_loss() as lost:
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
            if len(entries) > 1 and not isinstance(error, Unavailable):  # one of them alone may be wrong
                for entry in left:
                    self._keep(asyncio.create_task(self._call(state, [entry])))
            else:
                for _, ended in left:
                    ended.set_exception(copy(error))

    async def _read(self, state: ServerState, entries: Sequence[Outgoing]) -> None:
        await self._turn()
        entries = [entry for entry in entries if not entry[1].done()]  # some were cancelled meanwhile
        if not entries:
            return
        first, name = self.version, state.server.name
        rids = [f"{self._own}-{next(self._numbers)}-{name}" for _ in entries]
        inputs, params = [sample.input for sample, _ in entries], [sample.params for sample, _ in entries]
        images = [sample.images for sample, _ in entries]
        adapters = [sample.sampling.adapter for sample, _ in entries]
        request = Generation(rids, inputs, params, entries[0][0].request, images, adapters)
        for rid, (_, ended) in zip(rids, entries, strict=True):
            ended.add_done_callback(partial(self._abort_cancelled, state, rid))
        async with aclosing(read(self._turn, state.server, request)) as answer:
            async for parts in answer:
                state.progressed = time.monotonic()
                for place, piece in parts:
                    self._take(state, entries, place, piece, first)

    def _take(
        self, state: ServerState, entries: Sequence[Outgoing], place: int, piece: Piece | ServerError, first: int
    ) -> None:
        """Hand a sample its piece; raise ServerError if the answer concerns all of them, or none."""
        if place == OF_ALL and isinstance(piece, ServerError):
            raise piece
        if place >= len(entries):
            told = f"{state.server.name} gave an unusable answer: an event about input {place}"
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
            self._dispatch.update(state)
            self._give()

    def _abort_cancelled(self, state: ServerState, rid: str, ended: asyncio.Future[None]) -> None:
        """Abort a sample on its server that is no longer needed."""

        async def tell() -> None:
            with suppress(ServerError):
                await state.server.abort(rid, self._stall_s)

        if ended.cancelled() and not self._is_stopped:
            self._keep(asyncio.create_task(tell()))

    def _keep(self, call: asyncio.Task[None]) -> None:
        """Keep a reference to a background task until it ends."""
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _back_off(self, state: ServerState) -> None:
        if state.backing_off:  # samples that fail together are one failure
            return
        pause = min(PAUSE_S * 2 ** min(state.failures, 32), LONGEST_PAUSE_S)  # 2**1024 is more than a float
        state.backing_off = True
        state.failures += 1

        def end() -> None:
            state.backing_off = False
            self._dispatch.update(state)
            self._give()

        asyncio.get_running_loop().call_later(pause, end)

    async def _follow(self, state: ServerState) -> None:
        """Ask a server for its load at intervals, as long as it has samples."""
        while state.is_here:
            await asyncio.sleep(LOAD_S)
            if state.in_flight and not self._excused:
                with suppress(ServerError):
                    state.follow(await state.server.current_load(LOAD_S))
                    self._dispatch.update(state)
                    self._give()

    async def _look_after(self, state: ServerState) -> None:
        """Ask a server that has been silent for long for its progress, once for all of its samples."""
        now, pause = time.monotonic(), self._stall_s / 4
        if self._excused or now - max(state.progressed, state.asked) < pause:
            return
        state.asked = now
        with suppress(ServerError):
            done = await state.server.work_done(pause)
            if done != state.work_done:
                state.work_done, state.progressed = done, time.monotonic()
        now = time.monotonic()
        if not self._excused and state.is_here and now - state.progressed >= self._stall_s:
            state.progressed = now  # others may have asked meanwhile
            state.lose(f"made no progress for {self._stall_s:g} s (rollout.request_timeout_s)", "stalled")
            self.hung(state.server)


def _by_columns(entries: Sequence[Outgoing]) -> Iterable[Sequence[Outgoing]]:
    """Return samples in groups that want the same columns of the same tokens, which a request names once."""
    alike: dict[tuple[tuple[str, Any], ...], list[Outgoing]] = {}
    for entry in entries:
        alike.setdefault(tuple(entry[0].request.items()), []).append(entry)
    return alike.values()


def _not_drained(busy: Sequence[Server], deadline: Deadline) -> Unavailable:
    names = [server.name for server in busy]
    return Unavailable(
        f"{', '.join(names)} made no progress for {deadline.seconds:g} s on the requests in flight. With "
        "weight_update.requests=drain an update waits for these as long as they make progress within "
        "weight_update.timeout_s. Raise it, or set weight_update.requests=in_place",
        "late",
        names,
    )


PARTS, EVENTS = 2, 16  # parts of answers that are decoded in one turn of the event loop, and the events of each, 6 KB


async def read(turn: Turns, server: Server, request: Generation) -> AsyncGenerator[Sequence[Part]]:
    """Request a generation from a server, and yield its answer in parts; raise as `Server.generate` does."""
    async with aclosing(server.generate(request)) as answer:
        async for events in answer:
            for some in itertools.batched(events, EVENTS):
                await turn()
                yield [server.part_of(event) for event in some]
