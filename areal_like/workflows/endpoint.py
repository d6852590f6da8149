"""The episodes' API on loopback, for agents that run in processes of their own."""

import itertools
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from areal_like.workflows.openai_api import answer, failed
from areal_like.workflows.session import Session

_START_LIMIT_S = 60.0


@dataclass(frozen=True)
class Address:
    """Where an episode is served: `base_url` ends with `/v1`; `api_key` is good for this episode alone."""

    base_url: str
    api_key: str


class Endpoint(AbstractContextManager["Endpoint"]):
    """An HTTP server on a free port of loopback, in a thread of its own; `with Endpoint() as endpoint` ends it.

    An agent reaches the episode whose address it was given, with that episode's key, until the episode ends.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, tuple[str, Session]] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> "Endpoint":
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        app = Starlette(routes=[Route("/{episode}/{path:path}", self._handle, methods=["GET", "POST"])])
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

    @contextmanager
    def serving(self, session: Session) -> Iterator[Address]:
        """Serve an episode while the body runs."""
        name, key = str(next(self._numbers)), secrets.token_hex(16)
        self._sessions[name] = (key, session)
        try:
            yield Address(f"http://127.0.0.1:{self._socket.getsockname()[1]}/{name}/v1", key)
        finally:
            del self._sessions[name]

    async def _handle(self, request: Any) -> Any:
        from starlette.responses import Response

        key, session = self._sessions.get(request.path_params["episode"], ("", None))
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if session is None:
            reply = failed(404, "this episode is over, or never was")
        elif not secrets.compare_digest(given.encode(), key.encode()):
            reply = failed(401, "the API key is not this episode's")
        else:
            reply = await answer(session, request.method, "/" + request.path_params["path"], await request.body())
        return Response(reply.content, reply.status, media_type=reply.content_type)
