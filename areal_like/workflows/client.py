"""An `openai.AsyncOpenAI` whose requests are answered in this process: no port is open, nothing is sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from areal_like.workflows.openai_api import answer
from areal_like.workflows.session import Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI

BASE_URL = "http://areal-like.invalid/v1"  # a name that never resolves (RFC 2606)


@asynccontextmanager
async def client_of(session: Session) -> AsyncIterator["AsyncOpenAI"]:
    """A client whose chat completions go to the run's servers and are recorded in `session`."""
    import httpx
    from openai import AsyncOpenAI

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            reply = await answer(session, request.method, request.url.path, await request.aread())
            return httpx.Response(reply.status, headers={"Content-Type": reply.content_type}, content=reply.content)

    async with httpx.AsyncClient(transport=Transport(), trust_env=False) as http:
        yield AsyncOpenAI(api_key="none", base_url=BASE_URL, http_client=http, max_retries=0)
