"""The episodes' API on a port, for agents in other processes, in containers or on other hosts."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
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


class Endpoint(AbstractContextManager["Endpoint"]):
    """An HTTP server on a free port, in its own thread, which the end of the `with` block stops.

    An agent's key gives access to one episode, until the episode ends. `base_url` ends with `/v1`.
    """

    base_url: str

    def __init__(self, sessions: OpenSessions, episode: EpisodeConfig) -> None:
        self._sessions, self._episode = sessions, episode
        self._rate = episode.endpoint_rate
        self._asked: WeakKeyDictionary[Session, deque[float]] = WeakKeyDictionary()

    def __enter__(self) -> "Endpoint":
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        own, host = self._episode, self._episode.endpoint_host or LOOPBACK
        if host == "auto":
            host = own_address("Set episode.endpoint_host to an address of this host")
        try:
            self._socket = reserve_port(host)
        except OSError as error:
            where = f"The endpoint of episodes cannot listen on {host} (episode.endpoint_host): {error.strerror}."
            raise RunError(f"{where} Name an address of this host, or `auto`.") from error
        address = f"[{host}]" if ":" in host else host
        scheme = "https" if own.endpoint_certificate else "http"
        self.base_url = f"{scheme}://{address}:{self._socket.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/{path:path}", self._handle, methods=_METHODS)])
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            limit_concurrency=own.endpoint_max_connections,
            ssl_certfile=own.endpoint_certificate,
            ssl_keyfile=own.endpoint_key,
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
                f"The endpoint of episodes did not start on {host} within {_START_LIMIT_S:.0f} s. "
                "Check episode.endpoint_certificate and episode.endpoint_key, and the error above."
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _handle(self, request: Any) -> Any:
        body = await self._receive(request)
        if isinstance(body, Reply):
            return _as_response(body)
        leaving = asyncio.ensure_future(_wait_for_end(request))
        reply = await self._answer(request, body, leaving)
        if isinstance(reply, Stream):
            return _Streamed(reply, leaving)
        leaving.cancel()
        return _as_response(reply)

    async def _receive(self, request: Any) -> bytes | Reply:
        """Return the body of a request, or a refusal; check its key before reading its body, whose size is limited."""
        from starlette.requests import ClientDisconnect

        most = self._episode.endpoint_max_mb
        if (session := self._sessions.find(request.headers)) is None:
            return UNKNOWN_KEY
        if self._is_too_fast(session):
            problem = f"the episode sends more than {self._rate:g} requests per second (episode.endpoint_rate)"
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
        return body

    async def _answer(self, request: Any, body: bytes, leaving: asyncio.Future[None]) -> Reply | Stream:
        """Answer a request, unless its client leaves before."""
        answering = asyncio.ensure_future(
            self._sessions.respond(request.method, request.url.path, request.headers, body)
        )
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not answering.cancelled():
                reply = answering.result()
                if isinstance(reply, Reply) and reply.turn is not None:
                    reply.turn.note_delivery(not leaving.done())
                return reply
            return error_reply(409, "the episode is over")
        finally:
            answering.cancel()

    def _is_too_fast(self, session: Session) -> bool:
        """Count a request of an episode; return whether it exceeds the rate."""
        if self._rate is None:
            return False
        now, times = time.monotonic(), self._asked.setdefault(session, deque())
        while times and times[0] < now - RATE_WINDOW_S:
            times.popleft()
        if len(times) >= max(1, self._rate * RATE_WINDOW_S):
            return True
        times.append(now)
        return False


def _as_response(reply: Reply) -> Any:
    from starlette.responses import Response

    headers = {"Connection": "close"} if reply.status in _UNREAD_BODY else {}  # the unread body is not a request
    if reply.status == 429:
        headers["Retry-After"] = "1"
    return Response(reply.content, reply.status, headers, reply.content_type)


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


async def _wait_for_end(request: Any) -> None:
    """Wait for the end of a client's connection after its request was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Streamed:
    """An ASGI application that sends a stream, and stops when the client leaves."""

    def __init__(self, stream: Stream, leaving: asyncio.Future[None]) -> None:
        self._stream, self._leaving = stream, leaving

    async def __call__(self, scope: Any, receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        sending = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait((sending, self._leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            self._leaving.cancel()
            self._stream.close()

    async def _send(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        headers = [(b"content-type", EVENT_STREAM.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for events in self._stream.events():
            if self._stream.answer is not None:
                self._stream.answer.note_delivery(not self._leaving.done())
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
