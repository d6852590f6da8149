"""HTTP requests to one server: time limits, failures by kind, streams."""

import asyncio
import errno
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import orjson

from areal_like.core.errors import Fault, ServerError
from areal_like.core.rollout.http import AFTERMATH_S, Unavailable

HOST_MARGIN = 1.5  # times the time after which a silent host is lost: until it has been reported
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)

_DATA = b"data: "  # the start of each event of a stream


class Connection:
    """HTTP requests to the server at `url`, which errors call `name`.

    Each request except a stream awaits `turn`, if given: requests to hundreds of servers would block the event loop.
    A failed connection is raised after `aftermath_s` (default: AFTERMATH_S), or later if the host cannot be reached,
    which is reported after `host_timeout_s`; at once when the server leaves. `left` holds the reason why the server
    left the run, once it has left.
    """

    def __init__(
        self,
        name: str,
        url: str,
        session: aiohttp.ClientSession,
        turn: Callable[[], Awaitable[None]] | None = None,
        aftermath_s: float | None = None,
        host_timeout_s: float = 0.0,
    ) -> None:
        self.name = name
        self.url = url
        self.left: asyncio.Future[str] = asyncio.Future()
        self._session = session
        self._turn = turn
        self._aftermath_s = aftermath_s
        self._host_timeout_s = host_timeout_s
        self._pending: set[asyncio.Timeout] = set()

    def leave(self, why: str) -> None:
        """End all pending requests, except streams, as Unavailable: the server's host may never answer."""
        if not self.left.done():
            self.left.set_result(why)
        for request in self._pending:
            request.reschedule(asyncio.get_running_loop().time())

    async def post(self, path: str, body: dict[str, Any], timeout_s: float | None) -> Any:
        """POST JSON, numpy arrays included; return the answer's JSON, or None if the answer is empty.

        Without `timeout_s` the time is not limited. Raise Unavailable, or ServerError for an invalid request.
        """
        return await self._request("POST", path, body, timeout_s)

    async def get(self, path: str, timeout_s: float) -> Any:
        """GET JSON; raise as `post` does."""
        return await self._request("GET", path, None, timeout_s)

    async def update(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """POST a change of weights; raise ServerError unless the server reports success."""
        answer = await self.post(path, body, timeout_s)
        with self.reading(path):
            succeeded, message = answer.get("success"), answer.get("message", answer)
        if not succeeded:
            raise ServerError(f"{self.name} refused {path}: {message}", servers=[self.name])

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[list[bytes]]:
        """POST JSON and yield the JSON of the answer's events as they come, without a time limit; raise as `post`."""
        async with self._reply("POST", path, body, None) as reply:
            rest: list[bytes] = []
            async for part in reply.content.iter_any():
                if events := take_events(rest, part):
                    yield events

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Raise Unavailable, with the server's name, if the body cannot read an answer."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            message = f"{self.name} at {self.url}{path} gave an unusable answer: {error!r}"
            raise Unavailable(message, "unusable", [self.name]) from error

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> Any:
        if self._turn:
            await self._turn()
        data = None if body is None else encode(body)
        try:
            async with asyncio.timeout(0 if self.left.done() else None) as request:
                self._pending.add(request)
                try:
                    async with self._reply(method, path, data, timeout_s) as reply:
                        answer = await reply.read()
                        return orjson.loads(answer) if answer else None
                finally:
                    self._pending.discard(request)
        except TimeoutError:
            raise Unavailable(f"{self.name} at {self.url}{path} {self.left.result()}", "left", [self.name]) from None

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer; raise failures until its end as Unavailable or ServerError."""
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
            raise Unavailable(
                f"{where} gave an unusable answer, which is not JSON: {error}", "unusable", [self.name]
            ) from error
        except aiohttp.ClientError as error:
            await self._wait_for_cause(error)
            raise Unavailable(f"{where} failed: {error}", "connection", [self.name]) from error

    async def _wait_for_cause(self, error: aiohttp.ClientError) -> None:
        limit_s = AFTERMATH_S if self._aftermath_s is None else self._aftermath_s
        if isinstance(error, aiohttp.ClientOSError) and error.errno in _UNREACHABLE:
            limit_s = max(limit_s, HOST_MARGIN * self._host_timeout_s)
        await asyncio.wait((self.left,), timeout=limit_s)


def take_events(rest: list[bytes], part: bytes) -> list[bytes]:
    """Return the JSON of the events that `part` completes; `rest` has the parts of the next event.

    The parts of an event are joined once: one with the experts of a long response has hundreds.
    """
    across = bool(rest) and rest[-1].endswith(b"\n") and part.startswith(b"\n")
    rest.append(part)
    if b"\n\n" not in part and not across:
        return []
    *events, last = b"".join(rest).split(b"\n\n")
    rest[:] = [last] if last else []
    return [event[len(_DATA) :] for event in events if event != _DATA + b"[DONE]"]


def encode(body: dict[str, Any]) -> bytes:
    """Return JSON, numpy arrays included; raise ServerError if a value is too large for JSON."""
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise ServerError(f"a request cannot be written as JSON: {error}") from error


def may_pass(status: int) -> bool:
    """Return whether an HTTP status is a temporary failure of the server; other statuses reject the request itself."""
    return status >= 500 or status in (408, 429)


def fault_of(status: int) -> Fault:
    """Return the fault that an HTTP status counts as."""
    return "server_error" if may_pass(status) else "refused"
