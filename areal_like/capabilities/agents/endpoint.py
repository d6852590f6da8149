"""The episodes' API on a port, for agents in other processes, in containers or on other hosts."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from areal_like.backends.ray.interfaces import own_address
from areal_like.backends.ray.ray_cluster import LOOPBACK
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.replies import UNKNOWN_KEY, Reply, error_reply
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.capabilities.agents.session import Session
from areal_like.capabilities.agents.streams import EVENT_STREAM, Stream
from areal_like.core.errors import RunError
from areal_like.runtime.ports import reserve_port

BODY_LIMIT_S = 60.0  # limit for a client to send the body of a request
RATE_WINDOW_S = 10.0
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]  # most are rejected with the API's errors
_UNREAD_BODY = (401, 408, 413, 429)
_START_LIMIT_S = 60.0
_NO_ROUTE = "Set episode.endpoint_host to an address of this host"


@dataclass(frozen=True)
class EndpointSettings:
    """The endpoint's address and the limits of requests; `rate` is requests per second and episode."""

    host: str = LOOPBACK
    certificate: str | None = None
    key: str | None = None
    max_mb: int = 32  # a conversation of a million tokens has about 5 MB
    max_connections: int = 4096
    rate: float | None = None

    @classmethod
    def from_config(cls, episode: EpisodeConfig) -> "EndpointSettings":
        """Return the settings of a run."""
        host = own_address(_NO_ROUTE) if episode.endpoint_host == "auto" else episode.endpoint_host or LOOPBACK
        limits = episode.endpoint_max_mb, episode.endpoint_max_connections, episode.endpoint_rate
        return cls(host, episode.endpoint_certificate, episode.endpoint_key, *limits)


class Endpoint(AbstractContextManager["Endpoint"]):
    """An HTTP server on a free port, in its own thread; `with Endpoint(sessions) as endpoint` stops it at the end.

    An agent's key gives access to one episode, until the episode ends. `base_url` ends with `/v1`.
    """

    base_url: str

    def __init__(self, sessions: OpenSessions, settings: EndpointSettings | None = None) -> None:
        self._sessions, self._settings = sessions, settings or EndpointSettings()
        self._asked: WeakKeyDictionary[Session, deque[float]] = WeakKeyDictionary()

    def __enter__(self) -> "Endpoint":
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        own = self._settings
        try:
            self._socket = reserve_port(own.host)
        except OSError as error:
            where = f"The endpoint of episodes cannot listen on {own.host} (episode.endpoint_host): {error.strerror}."
            raise RunError(f"{where} Name an address of this host, or `auto`.") from error
        address = f"[{own.host}]" if ":" in own.host else own.host
        scheme = "https" if own.certificate else "http"
        self.base_url = f"{scheme}://{address}:{self._socket.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/{path:path}", self._handle, methods=_METHODS)])
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            limit_concurrency=own.max_connections,
            ssl_certfile=own.certificate,
            ssl_keyfile=own.key,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._server.started:
            self._server.should_exit = True
            self._socket.close()
            raise RunError(
                f"The endpoint of episodes did not start on {own.host} within {_START_LIMIT_S:.0f} s. "
                "Check episode.endpoint_certificate and episode.endpoint_key, and the error above."
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _handle(self, request: Any) -> Any:
        from starlette.responses import Response

        leaving = _Leaving(request)
        reply = await self._reply(request, leaving)
        if isinstance(reply, Stream):
            return _Streamed(reply, leaving)
        leaving.end()
        headers = {"Connection": "close"} if reply.status in _UNREAD_BODY else {}  # the unread body is not a request
        if reply.status == 429:
            headers["Retry-After"] = "1"
        return Response(reply.content, reply.status, headers, reply.content_type)

    async def _reply(self, request: Any, leaving: "_Leaving") -> Reply | Stream:
        """Answer a request; check its key before reading its body, whose size is limited."""
        from starlette.requests import ClientDisconnect

        most = self._settings.max_mb
        if (session := self._sessions.find(request.headers)) is None:
            return UNKNOWN_KEY
        if self._is_too_fast(session):
            problem = f"the episode sends more than {self._settings.rate:g} requests per second (episode.endpoint_rate)"
            return error_reply(429, problem, code="rate_limit_exceeded")
        try:
            async with asyncio.timeout(BODY_LIMIT_S):
                body = await _read_body(request, most << 20)
        except ClientDisconnect:
            return error_reply(400, "the connection closed before the request was complete")
        except TimeoutError:
            return error_reply(408, f"the request was not complete after {BODY_LIMIT_S:g} s")
        if body is None:
            return error_reply(413, f"the request has more than {most} MB (episode.endpoint_max_mb)")
        answering = asyncio.ensure_future(
            self._sessions.respond(request.method, request.url.path, request.headers, body)
        )
        try:
            await asyncio.wait((answering, leaving.start()), return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not answering.cancelled():
                reply = answering.result()
                if isinstance(reply, Reply):
                    reply.note_delivery(not leaving.has_left)
                return reply
            return error_reply(409, "the episode is over")
        finally:
            answering.cancel()

    def _is_too_fast(self, session: Session) -> bool:
        """Count a request of an episode; return whether it exceeds the rate."""
        if (rate := self._settings.rate) is None:
            return False
        now, times = time.monotonic(), self._asked.setdefault(session, deque())
        while times and times[0] < now - RATE_WINDOW_S:
            times.popleft()
        if len(times) >= max(1, rate * RATE_WINDOW_S):
            return True
        times.append(now)
        return False


async def _read_body(request: Any, most: int) -> bytes | None:
    """Return the body of a request, None if it is too large; then the rest stays unread."""
    body = bytearray()
    if int(request.headers.get("content-length", 0)) > most:
        return None
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            return None
    return bytes(body)


class _Leaving:
    """A watch for the end of a client's connection after its request was read."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._watching: asyncio.Future[None] | None = None

    def start(self) -> asyncio.Future[None]:
        """Return a future that is done when the client has left."""
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())
        return self._watching

    @property
    def has_left(self) -> bool:
        """Whether the client has left."""
        return self._watching is not None and self._watching.done()

    def end(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


class _Streamed:
    """An ASGI application that sends a stream, and stops when the client leaves."""

    def __init__(self, stream: Stream, leaving: _Leaving) -> None:
        self._stream, self._leaving = stream, leaving

    async def __call__(self, scope: Any, receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        sending = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait((sending, self._leaving.start()), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            self._leaving.end()
            self._stream.close()

    async def _send(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        headers = [(b"content-type", EVENT_STREAM.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for events in self._stream.events():
            if self._stream.has_ended:
                self._stream.note_delivery(not self._leaving.has_left)
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
