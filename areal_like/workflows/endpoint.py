"""The episodes' API on loopback, for agents that run in processes of their own."""

import socket
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from areal_like.workflows.openai_api import OpenSessions

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

        reply = await self._sessions.answer(request.method, request.url.path, request.headers, await request.body())
        return Response(reply.content, reply.status, media_type=reply.content_type)
