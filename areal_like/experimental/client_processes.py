"""Readers of the servers' answers: the controller itself, or client processes where one core is not enough.

A client process sends requests, reads and decodes the answers, and every EXCHANGE_S hands over what has come. Which
server takes which sample, and what counts as generated, is decided in the controller
(`areal_like/rollout/router.py`) as without them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import aiohttp
import numpy as np

from areal_like.cluster.workers import WorkerGroup
from areal_like.errors import RunError, ServerError
from areal_like.per_token import KeptIds
from areal_like.rollout.reading import EVENTS, PARTS, Parts, read
from areal_like.rollout.sglang.answers import OF_ALL, Part, Piece
from areal_like.rollout.sglang.http import Unavailable, session
from areal_like.rollout.sglang.server import Server
from areal_like.rollout.turns import Turns
from areal_like.types import FinishReason, Ints

HANDED_OVER = 4  # parts of answers, of as many events at most, that samples are given in one turn of the event loop
EXCHANGE_S = 0.05  # for so long a client process gathers what comes
HANGS_S = 60.0  # that an exchange may take, at most

type Call = tuple[int, str, str, bytes]  # its number; name and URL of the server, and the request
# a part; for columns how many they are, and what else a piece has
type Outline = tuple[int, FinishReason | None, int, bytes | None, KeptIds | None] | tuple[int, ServerError]


class News(NamedTuple):
    """Results of calls in the form that reaches another process fastest: the columns of all pieces are one array.

    An outline of None is the end of a call.
    """

    columns: Ints
    outlines: Mapping[int, Sequence[Outline | None]]

    @classmethod
    def pack(cls, came: Mapping[int, Sequence[Part | None]]) -> Self:
        """Pack the parts of each call."""
        columns = [np.empty((3, 0), np.int32)]

        def outline(part: Part | None) -> Outline | None:
            if part is None:
                return None
            place, piece = part
            if isinstance(piece, ServerError):
                return place, piece
            columns.append(piece.columns)
            return place, piece.finish_reason, piece.columns.shape[1], piece.routes, piece.kept

        outlines = {call: [outline(part) for part in parts] for call, parts in came.items()}
        return cls(np.concatenate(columns, axis=1), outlines)

    def calls(self) -> Iterator[tuple[int, list[Part], bool]]:
        """Return the parts of each call, and whether it has ended."""
        end = 0
        for call, outlines in self.outlines.items():
            parts: list[Part] = []
            for outline in outlines:
                if outline is None:
                    continue
                if len(outline) == 2:
                    parts.append(outline)
                else:
                    place, finish_reason, tokens, routes, kept = outline
                    start, end = end, end + tokens
                    parts.append((place, Piece(self.columns[:, start:end], finish_reason, routes, kept)))
            yield call, parts, outlines[-1] is None


class Client:
    """Body of a client process; `token` is the servers'."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._session: aiohttp.ClientSession | None = None  # which needs an event loop
        self._turn = Turns(PARTS)
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._news: dict[int, list[Part | None]] = defaultdict(list)

    async def exchange(self, calls: Iterable[Call], over: Iterable[int]) -> News:
        """Start calls and end those in `over`; return the parts of each."""
        self._session = self._session or session(self._token)
        for call, name, url, request in calls:
            server = Server(name, url, self._session)
            self._reading[call] = asyncio.create_task(self._read(call, server, request))
            self._reading[call].add_done_callback(partial(self._end, call))
        for call in over:
            self._reading.pop(call).cancel()
            self._news.pop(call, None)
        await asyncio.sleep(EXCHANGE_S)
        news, self._news = self._news, defaultdict(list)
        return News.pack(news)

    async def _read(self, call: int, server: Server, request: bytes) -> None:
        async with aclosing(read(self._turn, server, request)) as answer:
            await anext(answer)
            async for parts in answer:
                self._news[call].extend(parts)

    def _end(self, call: int, reading: asyncio.Task[None]) -> None:
        if reading.cancelled():
            return
        if error := reading.exception():
            told = error if isinstance(error, ServerError) else Unavailable(f"client: {error!r}", "client")
            self._news[call].append((OF_ALL, told))
        self._news[call].append(None)


@dataclass(eq=False)
class Link:
    """A client process for the controller: its calls, and the news it has not received yet."""

    rank: int
    group: WorkerGroup
    news: dict[int, asyncio.Queue[Parts | None]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    is_busy: bool = False


class Clients:
    """All client processes of a run, at best `n`.

    `start` starts one, an actor (`Client`), by its rank. A client process that dies is replaced; its requests continue
    elsewhere. As long as none is left, the controller reads. One that hangs is found before a server would be blamed
    for it, which may do nothing for `stall_s` seconds.
    """

    def __init__(
        self, n: int, start: Callable[[int], Awaitable[WorkerGroup]], say: Callable[[str], None], stall_s: float
    ) -> None:
        self._n = n
        self._start = start
        self._say = say
        self._limit_s = min(HANGS_S, stall_s / 2)
        self._links: list[Link] = []
        self._numbers = itertools.count()
        self._turn, self._hand = Turns(PARTS), Turns(HANDED_OVER)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        groups = await asyncio.gather(*map(self._start, range(self._n)))
        self._links = [Link(rank, group) for rank, group in enumerate(groups)]
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._tasks:  # the end of one may be the start of another
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)  # gather would not let the event loop turn where all of them are done
        for link in self._links:
            link.group.kill()

    def read(self, server: Server, request: bytes) -> AsyncGenerator[Parts]:
        """Read an answer in the client process with the fewest calls; also raise Unavailable if that process dies."""
        link = min(self._links, key=lambda link: len(link.news), default=None)
        return self._read(link, server, request) if link else read(self._turn, server, request)

    async def _read(self, link: Link, server: Server, request: bytes) -> AsyncGenerator[Parts]:
        call, news = next(self._numbers), asyncio.Queue[Parts | None]()
        link.news[call] = news
        link.calls.append((call, server.name, server.url, request))
        self._wake(link)
        try:
            while (parts := await news.get()) is not None:
                yield parts
        finally:
            del link.news[call]
            link.over.append(call)
            self._wake(link)

    def _wake(self, link: Link) -> None:
        if not link.is_busy and link in self._links:
            link.is_busy = True
            self._keep(self._exchange(link), partial(self._lose, link))

    async def _exchange(self, link: Link) -> None:
        """Exchange news with a client process as long as it has calls."""
        while link.news or link.over:
            calls, link.calls, over, link.over = link.calls, [], link.over, []
            try:
                async with asyncio.timeout(self._limit_s):
                    came: News = await link.group.call_one(0, "exchange", calls, over, phase="reading")
            except TimeoutError as error:
                raise RunError(f"no exchange within {self._limit_s:g} s") from error
            for call, *_ in calls:
                self._hand_over(link, call, [()])
            for call, parts, has_ended in came.calls():
                for some in itertools.batched(parts, EVENTS):
                    await self._hand()
                    self._hand_over(link, call, [some])
                if has_ended:
                    self._hand_over(link, call, [None])
        link.is_busy = False

    def _hand_over(self, link: Link, call: int, news: Iterable[Parts | None]) -> None:
        if call in link.news:  # else no caller waits for it any more
            for parts in news:
                link.news[call].put_nowait(parts)

    def _lose(self, link: Link, why: str) -> None:
        self._links.remove(link)
        link.group.kill()
        lost: Part = (OF_ALL, Unavailable(f"client process {link.rank} was lost: {why}", "client"))
        for call in link.news:
            self._hand_over(link, call, [(), [lost]])
        self._keep(
            self._start_again(link.rank, why),
            lambda error: self._say(f"client process {link.rank} was lost and is not replaced: {why}; {error}"),
        )

    async def _start_again(self, rank: int, why: str) -> None:
        self._links.append(Link(rank, await self._start(rank)))
        self._say(f"client process {rank} was restarted: {why}")

    def _keep(self, work: Coroutine[Any, Any, None], failed: Callable[[str], None]) -> None:
        """Do work, and call `failed` with the cause of any failure."""

        def finish(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                failed(str(error) if isinstance(error, RunError) else repr(error))

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(finish)
