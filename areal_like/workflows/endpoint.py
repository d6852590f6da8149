"""The episodes' API on loopback, for agents that run in processes of their own."""

import asyncio
import socket
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from areal_like.workflows.openai_api import UNKNOWN_KEY, OpenSessions, Reply, failed

MOST_BODY = 32 << 20  # bytes; a conversation of a million tokens has some 5 MB
_UNREAD_BODY = (401, 413)
_START_LIMIT_S = 60.0


class Endpoint(AbstractContextManager["Endpoint"]):
    """An HTTP server on a free port of loopback, in a thread of its own; `with Endpoint(sessions) as endpoint` ends it.

    An agent reaches the episode whose key it was given, until the episode ends. `base_url` ends with `/v1`.
    """

    base_url: str

    def __init__(self, sessions: OpenSessions) -> None:
        self._sessions = sessions

    def __enter__(self) -> "Endpoint":
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        app = Starlette(routes=[Route("/{path:path}", self._handle, methods=["GET", "POST"])])
        settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="endpoint", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    async def _handle(self, request: Any) -> Any:
        from starlette.responses import Response

        reply = await self._reply(request)
        headers = {"Connection": "close"} if reply.status in _UNREAD_BODY else None  # what follows is not a request
        return Response(reply.content, reply.status, headers, reply.content_type)

    async def _reply(self, request: Any) -> Reply:
        """Answer a request: its key is looked at before its body is read, and the body is of limited size."""
        from starlette.requests import ClientDisconnect

        if self._sessions.find(request.headers) is None:
            return UNKNOWN_KEY
        try:
            body = await _body(request)
        except ClientDisconnect:
            return failed(400, "the connection closed before the request was complete")
        if body is None:
            return failed(413, f"the request has more than {MOST_BODY >> 20} MB, the most that one may have")
        answering = asyncio.ensure_future(
            self._sessions.answer(request.method, request.url.path, request.headers, body)
        )
        leaving = asyncio.ensure_future(_watch_left(request))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not answering.cancelled():
                reply = answering.result()
                reply.delivered(not leaving.done())
                return reply
            return failed(409, "the episode is over")
        finally:
            answering.cancel()
            leaving.cancel()


async def _body(request: Any) -> bytes | None:
    """The body of a request, None where it is too large; what was not read of it then stays with the client."""
    body = bytearray()
    if int(request.headers.get("content-length", 0)) > MOST_BODY:
        return None
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            return None
    return bytes(body)


async def _watch_left(request: Any) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
