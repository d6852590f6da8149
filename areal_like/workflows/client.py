"""`openai.AsyncOpenAI` clients whose requests are answered in this process: no port is open, nothing is sent."""

import asyncio
import copy
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from areal_like.workflows.endpoint import Endpoint
from areal_like.workflows.openai_api import OpenSessions
from areal_like.workflows.session import Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NOWHERE = "http://areal-like.invalid/v1"  # a name that never resolves (RFC 2606)


class Clients(AbstractAsyncContextManager["Clients"]):
    """Makes the clients of a run's episodes. With `on_loopback` their `base_url` and `api_key` work in other processes.

    To make an OpenAI client takes as long as a request, and so does an HTTP client's search for redirects and cookies:
    all are copies of one that has none of these.
    """

    def __init__(self, *, on_loopback: bool = False) -> None:
        self._sessions = OpenSessions()
        self._endpoint = Endpoint(self._sessions) if on_loopback else None

    async def __aenter__(self) -> Self:
        if self._endpoint:
            await asyncio.to_thread(self._endpoint.__enter__)
        from openai import AuthenticationError

        self._original = await asyncio.to_thread(self._make, self._endpoint.base_url if self._endpoint else NOWHERE)
        with suppress(AuthenticationError):  # with its first request a client finds out about its platform, in a thread
            await self._original.get("/models", cast_to=object)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._original.close()
        if self._endpoint:
            await asyncio.to_thread(self._endpoint.__exit__)

    @contextmanager
    def of(self, session: Session) -> Iterator["AsyncOpenAI"]:
        """A client whose completions go to the run's servers and are recorded in `session`, while the body runs."""
        with self._sessions.open(session) as key:
            client = copy.copy(self._original)
            client.api_key = key
            yield client

    def _make(self, base_url: str) -> "AsyncOpenAI":
        import httpx
        from openai import AsyncOpenAI

        sessions = self._sessions

        class InProcess(httpx.AsyncClient):
            async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
                body = await request.aread()
                reply = await sessions.answer(request.method, request.url.path, request.headers, body)
                headers = {"Content-Type": reply.content_type}
                return httpx.Response(reply.status, headers=headers, content=reply.content, request=request)

        http = InProcess(trust_env=False)
        return AsyncOpenAI(api_key="none", base_url=base_url, http_client=http, max_retries=0)
