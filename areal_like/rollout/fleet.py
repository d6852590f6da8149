"""The servers of a run: who joins and leaves, and who of them takes which request.

- A server joins when nothing is on its way and it has been given all weights: when the fleet opens.
- A server is sent `AHEAD` times what it runs at once; the rest waits here, so the oldest work goes first everywhere.
- A server that fails rests for a while and then has to answer one request before it is sent more.
- A server that leaves, or does nothing for `stall_s` although it has requests, gives these back as Unavailable.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from areal_like import events
from areal_like.errors import ServerError
from areal_like.rollout.sglang.http import Deadline, Server, Unavailable

AHEAD = 2  # a request's samples end one by one and its answer comes with the last: what follows keeps a server full
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # of a server that failed; twice as long each time in a row


@dataclass(eq=False)
class Member:
    """A server and what is known of it; `in_flight` and `room` count sequences, of which there are 0 until it joins."""

    server: Server
    room: int = 0
    in_flight: int = 0
    failures: int = 0  # since it last answered
    resting: bool = False
    lost: asyncio.Future[str] = field(default_factory=asyncio.Future)  # why it gives its requests back
    work_done: Any = None
    progressed: float = 0.0  # when it did something, and when it was last asked; on time.monotonic's clock
    asked: float = 0.0

    def takes(self, sequences: int) -> bool:
        """Whether a request may go there; one that is larger than the room goes alone."""
        if self.resting or not self.room:
            return False
        return not self.in_flight or (not self.failures and self.in_flight + sequences <= self.room)

    def lose(self, cause: str, *, for_good: bool) -> None:
        """Give all requests back, and with `for_good` those too that are on their way to it."""
        if not self.lost.done():
            self.lost.set_result(f"{self.server.name} at {self.server.url} {cause}")
            self.lost = self.lost if for_good else asyncio.Future()


class Fleet:
    """All servers of a run; closed until it is opened for the first time."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._members: list[Member] = []
        self._queue: list[tuple[int, int, int, asyncio.Future[Member]]] = []
        self._arrivals = itertools.count()
        self._is_open = False
        self._excused = False
        self._idle = asyncio.Event()  # nothing is on its way
        self._idle.set()

    @property
    def servers(self) -> list[Server]:
        """Everybody who has to have the next weights."""
        return [member.server for member in self._members]

    @property
    def busy(self) -> list[Server]:
        """Servers with requests on their way."""
        return [member.server for member in self._members if member.in_flight]

    def join(self, server: Server) -> None:
        """Have a server take part from the next opening on."""
        self._members.append(Member(server))

    def leave(self, server: Server) -> None:
        """Take a server out at once; its requests go on elsewhere, or end in ServerError where nobody is left."""
        for member in [member for member in self._members if member.server is server]:
            self._members.remove(member)
            member.lose("left the run", for_good=True)
        self._dispatch()

    async def close(self, deadline: Deadline) -> None:
        """Send no further request, and wait for those on their way.

        Raises ServerError, which names the servers that are late.
        """
        self._is_open = False
        try:
            await asyncio.wait_for(self._idle.wait(), deadline.left)
        except TimeoutError:
            names = ", ".join(server.name for server in self.busy)
            late = f"{names} did not give back the requests in flight within {deadline.seconds:g} s"
            raise ServerError(late) from None

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Do not take it for a fault that servers do nothing while the body runs."""
        self._excused = True
        try:
            yield
        finally:
            self._excused = False
            for member in self._members:
                member.progressed = time.monotonic()

    async def open(self, deadline: Deadline) -> None:
        """Send requests, from now on also to those who wanted to join."""
        for member in [member for member in self._members if not member.room]:
            member.room = AHEAD * await member.server.most_running(deadline.left)
        self._is_open = True
        self._dispatch()

    @asynccontextmanager
    async def place(self, sequences: int, priority: int) -> AsyncIterator[Member]:
        """A server with room for a request of so many sequences; of those that wait the smallest `priority` is next."""
        turn: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._arrivals), sequences, turn))
        self._dispatch()
        try:
            member = await turn
            yield member
            member.failures = 0
        except Unavailable:
            self._rest(member)
            raise
        finally:
            if turn.done() and not turn.cancelled() and not turn.exception():
                turn.result().in_flight -= sequences
                if not turn.result().in_flight:
                    events.turn(turn.result().server.name, None)
            if not self.busy:
                self._idle.set()
            self._dispatch()

    async def ask(self, member: Member, body: dict[str, Any]) -> Any:
        """Have a server generate as long as it does anything; raises Unavailable where it does not, or leaves."""
        lost = member.lost
        call = asyncio.ensure_future(member.server.post("/generate", body, None))
        try:
            while not call.done():
                if lost.done():
                    raise Unavailable(lost.result())
                await self._look_after(member)
                await asyncio.wait((call, lost), timeout=self._stall_s / 4, return_when=asyncio.FIRST_COMPLETED)
            answer = call.result()
            member.progressed = time.monotonic()
            return answer
        finally:
            call.cancel()

    def _dispatch(self) -> None:
        while self._queue:
            *_, sequences, turn = self._queue[0]
            free = [member for member in self._members if member.takes(sequences)] if self._is_open else []
            if turn.cancelled():
                pass
            elif free:
                self._give(turn, min(free, key=lambda member: member.in_flight), sequences)
            elif self.servers:
                return
            else:
                turn.set_exception(ServerError("no server is left"))
            heapq.heappop(self._queue)

    def _give(self, turn: asyncio.Future[Member], member: Member, sequences: int) -> None:
        if not member.in_flight:
            member.progressed = time.monotonic()
            events.turn(member.server.name, "generating")
        member.in_flight += sequences
        self._idle.clear()
        turn.set_result(member)

    def _rest(self, member: Member) -> None:
        if member.resting:  # requests that fail together are one failure
            return
        pause = min(PAUSE_S * 2**member.failures, LONGEST_PAUSE_S)
        member.resting = True
        member.failures += 1

        def rested() -> None:
            member.resting = False
            self._dispatch()

        asyncio.get_running_loop().call_later(pause, rested)

    async def _look_after(self, member: Member) -> None:
        """Ask a server that has not answered for long what it has done meanwhile, once for all of its requests."""
        now, pause = time.monotonic(), self._stall_s / 4
        if self._excused or now - max(member.progressed, member.asked) < pause:
            return
        member.asked = now
        with suppress(ServerError):
            done = await member.server.work_done(pause)
            if done != member.work_done:
                member.work_done, member.progressed = done, time.monotonic()
        if not self._excused and time.monotonic() - member.progressed >= self._stall_s:
            member.lose(f"did nothing for {self._stall_s:g} s (rollout.request_timeout_s)", for_good=False)
