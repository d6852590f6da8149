"""SGLang servers on a simulated clock, behind a stand-in for aiohttp's session, that die or are cut off.

A server generates a fixed number of tokens per second for each of the samples that it runs at once; others wait for a
place. Each token holds its place in the response and the response's length, so another server can continue a sample,
and lost or repeated tokens show.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from areal_like.rollout.sglang.labels import LABELS
from areal_like.rollout.sglang.patches.columns import with_columns

RUNNING = 4  # samples that a server runs at once
PREFILL_S, ANSWER_S = 0.5, 0.01
LOAD_S = 2.0  # a server needs for new weights
PIECE_S = 32.0  # after which a server sends what it has
TOKENS_PER_S = 2  # of a sample; a simulated token stands for some 16 real ones
MOST, MEDIAN, SPREAD = 320, 100, 0.5  # tokens of a response, whose length is log-normal
_SHIFT = 10  # bits of a token that hold its place in the response


def token(place: int, length: int) -> int:
    """Return the token at a place of a response of a length."""
    return length << _SHIFT | place


def is_complete(tokens: list[int]) -> bool:
    """Return whether a response has all of its tokens, each once."""
    return tokens == [token(place, len(tokens)) for place in range(len(tokens))]


@dataclass(eq=False)
class SimulatedServer:
    """One server on a host of its own. `died` is set when its process has ended; a host that is cut off is `silent`."""

    rng: Random
    version: str = "0"
    died: asyncio.Future[None] = field(default_factory=asyncio.Future)
    generates: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RUNNING))

    def __post_init__(self) -> None:
        self.generates.set()
        self.reached.set()

    @property
    def works(self) -> bool:
        """Whether its process runs, and its host can be reached."""
        return self.reached.is_set() and not self.died.done()

    def die(self) -> None:
        """End the server's process."""
        if not self.died.done():
            self.died.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Let time pass; raise as aiohttp does if the process ends meanwhile."""
        await asyncio.wait((self.died,), timeout=seconds)
        if self.died.done():
            raise aiohttp.ClientOSError(errno.ECONNRESET, "Connection reset by peer")
        await self.reached.wait()

    async def generate(self, request: bytes) -> AsyncIterator[bytes]:
        """Yield the events of an answer."""
        asked = orjson.loads(request)
        events: asyncio.Queue[bytes | aiohttp.ClientError] = asyncio.Queue()
        samples = [
            asyncio.create_task(self._sample(place, tokens, events)) for place, tokens in enumerate(asked["input_ids"])
        ]
        try:
            while not all(sample.done() for sample in samples) or not events.empty():
                event = await events.get()
                if isinstance(event, aiohttp.ClientError):
                    raise event
                yield event
        finally:
            for sample in samples:
                sample.cancel()

    async def _sample(self, index: int, tokens: list[int], events: asyncio.Queue[bytes | aiohttp.ClientError]) -> None:
        place, length = (tokens[-1] & ((1 << _SHIFT) - 1)) + 1, tokens[-1] >> _SHIFT
        if not length:
            place = 0
            length = min(MOST, max(1, int(self.rng.lognormvariate(0, SPREAD) * MEDIAN)))
        try:
            async with self.places:
                await self.wait(PREFILL_S)
                while place < length:
                    amount = min(length - place, int(PIECE_S * TOKENS_PER_S))
                    await self.wait(amount / TOKENS_PER_S)
                    await self.generates.wait()
                    events.put_nowait(self._event(index, place, amount, length))
                    place += amount
        except aiohttp.ClientError as error:
            events.put_nowait(error)

    def _event(self, index: int, place: int, amount: int, length: int) -> bytes:
        info = {
            "finish_reason": {"type": "stop"} if place + amount == length else None,
            "output_token_logprobs": [(-0.5, token(each, length), None) for each in range(place, place + amount)],
            LABELS: [self.version] * amount,
        }
        return b"data: " + orjson.dumps(with_columns({"meta_info": info, "index": index})) + b"\n\n"

    async def answer(self, path: str, request: bytes | None) -> Any:
        """Answer a request that is not for tokens."""
        await self.wait(LOAD_S if "update_weights" in path else ANSWER_S)
        if "update_weights" in path:
            self.version = orjson.loads(request or b"")["weight_version"]
        elif "pause" in path:
            self.generates.clear()
        elif "continue" in path:
            self.generates.set()
        counts = ("num_running_reqs", "num_waiting_reqs", "num_total_tokens", "total_prefill_uncached_tokens")
        answers: dict[str, Any] = {
            "/model_info": {"weight_version": self.version},
            "/server_info": {"internal_states": [{"effective_max_running_requests_per_dp": RUNNING}]},
            "/v1/loads": {"loads": [dict.fromkeys(counts, 0) | {"token_usage": 0.3}]},
        }
        return answers.get(path, {"success": True})


@dataclass
class Reply:
    """An answer as the engine reads aiohttp's."""

    server: SimulatedServer
    path: str
    request: bytes | None
    status: int = 200

    @property
    def content(self) -> Reply:
        return self

    def iter_any(self) -> AsyncIterator[bytes]:
        return self.server.generate(self.request or b"")

    async def read(self) -> bytes:
        return orjson.dumps(await self.server.answer(self.path, self.request))


@dataclass
class Network:
    """All servers by host name, and what stands in for aiohttp's session with them."""

    rng: Random
    servers: dict[str, SimulatedServer] = field(default_factory=dict)

    def start(self, version: str = "0") -> str:
        """Start a server on a new host; return its URL."""
        name = f"host{len(self.servers)}"
        self.servers[name] = SimulatedServer(self.rng, version)
        return f"http://{name}"

    def server(self, url: str) -> SimulatedServer:
        """Return the server at a URL."""
        return self.servers[str(urlsplit(url).hostname)]

    async def answers(self, url: str, limit_s: float) -> bool:
        """Return whether a host answers a heartbeat within a limit."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.server(url).reached.wait(), limit_s)
        return self.server(url).reached.is_set()

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, data: bytes | None, headers: Any, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[Reply]:
        """Yield the answer to a request."""
        server = self.server(url)
        async with asyncio.timeout(timeout.total):
            await server.reached.wait()
            if server.died.done():
                raise aiohttp.ClientOSError(errno.ECONNREFUSED, "Connection refused")
            yield Reply(server, urlsplit(url).path, data)

    async def close(self) -> None:
        """End nothing: a server's tasks end with their requests."""
