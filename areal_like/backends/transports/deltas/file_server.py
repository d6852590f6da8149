"""A web server for files of weights: servers of a run download them with its token (`weight_update.url: auto`)."""

import asyncio
import hmac
import re
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

from aiohttp import web

from areal_like.backends.ray.placement import url
from areal_like.core.errors import RunError
from areal_like.runtime.ports import reserve_port

_NAME = re.compile(r"[\w-]+(\.delta)?\.safetensors")


class FileServer(AbstractContextManager[str]):
    """Serves a directory's files of weights in a thread of its own; the context has the URL.

    It knows ranges, so that a download continues, and sends files without copies in this process (sendfile).
    """

    def __init__(self, directory: Path, host: str, token: str) -> None:
        self._directory, self._host = directory, host
        self._expected = f"Bearer {token}".encode()

    def __enter__(self) -> str:
        try:
            self._socket = reserve_port(self._host)
        except OSError as error:
            problem = f"The file server of weight_update.url=auto cannot listen on {self._host}: {error.strerror}."
            raise RunError(f"{problem} Free a port of cluster.ports, or set weight_update.url=null.") from error
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="weight files", daemon=True)
        self._thread.start()
        started.result()
        return url(self._host, self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._socket.close()

    def _run(self, started: Future[None]) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/{name:.*}", self._answer)  # any path, so that none is known without the token
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        try:
            await runner.setup()
            await web.SockSite(runner, self._socket).start()
        except OSError as error:
            started.set_exception(RunError(f"The file server of weight_update.url=auto did not start: {error}."))
            return
        started.set_result(None)
        await self._ended.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a file: the token is looked at first."""
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), self._expected):
            raise web.HTTPUnauthorized
        name = request.match_info["name"]
        path = self._directory / name
        if not _NAME.fullmatch(name) or not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)
