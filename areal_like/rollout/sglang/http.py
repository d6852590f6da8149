"""One SGLang server over HTTP (0.5.17's endpoints)."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from areal_like.errors import Fault, ServerError
from areal_like.rollout.sglang import KEEP_ALIVE_S

# A request to a dying server breaks before the server's watcher has said why: let that be heard first.
AFTERMATH_S = 3.0


class Unavailable(ServerError):
    """A server failed, was silent or left. What it was asked for may be asked again, of another or later."""


@dataclass(frozen=True)
class Load:
    """Requests that a server runs, and that wait there; `kv_use` is the share of its KV cache that they fill."""

    running: int
    waiting: int
    kv_use: float


def session(token: str) -> aiohttp.ClientSession:
    """Connections to servers, for one event loop; whoever asks for it closes it."""
    # The client closes what is idle. Were it the server, it might do so just when a connection is used again.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S / 2)
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, connector=connector)


class Deadline:
    """A time limit that several requests share, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begin anew."""
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds left; never 0, which would mean no limit to a request."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end


class Server:
    """Requests to one SGLang server; `name` is what errors call it.

    Each request but a stream waits for its `turn`, if there is one: those to hundreds of servers would block the event
    loop. `rank` is the place in the layout, None for one beyond it, which may fail without a run's end. `left` is why
    it left the run, once it has.
    """

    def __init__(
        self,
        name: str,
        url: str,
        session: aiohttp.ClientSession,
        rank: int | None = None,
        turn: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self.rank = rank
        self.left: asyncio.Future[str] = asyncio.Future()
        self._session = session
        self._turn = turn
        self._asking: set[asyncio.Timeout] = set()

    def leave(self, why: str) -> None:
        """End what it is asked just now, other than streams, as Unavailable; its host may be silent for ever."""
        if not self.left.done():
            self.left.set_result(why)
        for asking in self._asking:
            asking.reschedule(asyncio.get_running_loop().time())

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None) -> Any:
        """POST JSON, numpy arrays included, and return the answer's JSON, None where it is empty.

        Without `timeout_s` it may take for ever. Raises Unavailable, and ServerError for a request that is wrong.
        """
        return await self._request("POST", path, body, timeout_s)

    async def get(self, path: str, timeout_s: float) -> Any:
        """GET JSON; raises as `post` does."""
        return await self._request("GET", path, None, timeout_s)

    async def update(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """POST a change of weights; raises ServerError unless the server says that it succeeded."""
        answer = await self.post(path, body, timeout_s)
        with self._using(path):
            succeeded, message = answer.get("success"), answer.get("message", answer)
        if not succeeded:
            raise ServerError(f"{self.name} refused {path}: {message}", servers=[self.name])

    async def weight_version(self, timeout_s: float) -> str:
        """The version of the weights that the server holds."""
        answer = await self.get("/model_info", timeout_s)
        with self._using("/model_info"):
            return str(answer["weight_version"])

    async def most_running(self, timeout_s: float) -> int:
        """How many sequences the server decodes at once, at least 1."""
        answer = await self.get("/server_info", timeout_s)
        with self._using("/server_info"):
            most = sum(state["effective_max_running_requests_per_dp"] for state in answer["internal_states"])
            if most < 1:
                raise ValueError(f"{most} sequences at once")
            return int(most)

    async def work_done(self, timeout_s: float) -> Any:
        """What changes with every few tokens that the server generates, and with nothing else.

        The server answers without asking its scheduler, so also when that stands still.
        """
        answer = await self.get(_LOADS, timeout_s)
        counts = ("num_running_reqs", "num_waiting_reqs", "num_total_tokens", "total_prefill_uncached_tokens")
        with self._using("/v1/loads"):
            return [[load[count] for count in counts] for load in answer["loads"]]

    async def load(self, timeout_s: float) -> Load:
        """How full the server is; it answers from its scheduler's last note, which costs that nothing."""
        answer = await self.get(_LOADS, timeout_s)
        with self._using("/v1/loads"):
            loads = answer["loads"]
            running, waiting = (
                sum(int(load[f"num_{state}_reqs"]) for load in loads) for state in ("running", "waiting")
            )
            return Load(running, waiting, max(float(load["token_usage"]) for load in loads))

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[list[bytes]]:
        """POST JSON; gives the JSON of its answer's events as they come, no time limit. Raises as `post` does."""
        async with self._reply("POST", path, body, None) as reply:
            rest = b""
            async for part in reply.content.iter_any():
                *events, rest = (rest + part).split(b"\n\n")
                yield [event[len(_DATA) :] for event in events if event != _DATA + b"[DONE]"]

    @contextmanager
    def _using(self, path: str) -> Iterator[None]:
        """Name the server of whose answer the body cannot make anything."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            where = f"{self.name} at {self.url}{path}"
            message = f"{where} gave an answer that cannot be used: {error!r}"
            raise Unavailable(message, "unusable", [self.name]) from error

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        if self._turn:
            await self._turn()
        data = None if body is None else encoded(body)
        try:
            async with asyncio.timeout(0 if self.left.done() else None) as asking:
                self._asking.add(asking)
                try:
                    async with self._reply(method, path, data, timeout_s) as reply:
                        answer = await reply.read()
                        return orjson.loads(answer) if answer else None
                finally:
                    self._asking.discard(asking)
        except TimeoutError:
            raise Unavailable(f"{self.name} at {self.url}{path} {self.left.result()}", "left", [self.name]) from None

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer while it is read; failures until its end are told as Unavailable or ServerError."""
        where = f"{self.name} at {self.url}{path}"
        headers = {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=timeout_s, ceil_threshold=math.inf)
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, timeout=limit
            ) as reply:
                if reply.status != 200:
                    answer = (await reply.read()).decode(errors="replace")
                    error = Unavailable if may_pass(reply.status) else ServerError
                    message = f"{where} answered {reply.status}: {answer[:500]}"
                    raise error(message, fault_of(reply.status), [self.name])
                yield reply
        except TimeoutError:
            raise Unavailable(f"{where} did not answer within {timeout_s:.3g} s", "late", [self.name]) from None
        except orjson.JSONDecodeError as error:
            raise Unavailable(f"{where} answered what is not JSON: {error}", "unusable", [self.name]) from error
        except aiohttp.ClientError as error:
            await asyncio.sleep(AFTERMATH_S)
            raise Unavailable(f"{where} failed: {error}", "connection", [self.name]) from error


_LOADS = "/v1/loads?include=core"
_DATA = b"data: "  # each event begins with it


def encoded(body: dict[str, Any]) -> bytes:
    """JSON, numpy arrays included; raises ServerError where something is too large for it."""
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise ServerError(f"a request cannot be written as JSON: {error}") from error


def may_pass(status: int) -> bool:
    """Whether an HTTP status is the server's trouble of the moment; others find fault with the request itself."""
    return status >= 500 or status in (408, 429)


def fault_of(status: int) -> Fault:
    """What an HTTP status is counted as."""
    return "server_error" if may_pass(status) else "refused"
