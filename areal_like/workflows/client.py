"""An `openai.AsyncOpenAI` whose requests are answered in this process: no port is open, nothing is sent."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from areal_like.workflows.endpoint import Address, Endpoint
from areal_like.workflows.openai_api import answer
from areal_like.workflows.session import Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NOWHERE = Address("http://areal-like.invalid/v1", "none")  # a name that never resolves (RFC 2606)


@asynccontextmanager
async def client_of(session: Session, endpoint: Endpoint | None = None) -> AsyncIterator["AsyncOpenAI"]:
    """A client whose chat completions go to the run's servers and are recorded in `session`.

    With an `endpoint` its `base_url` and `api_key` reach the same session from other processes too.
    """
    import httpx
    from openai import AsyncOpenAI

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            reply = await answer(session, request.method, request.url.path, await request.aread())
            return httpx.Response(reply.status, headers={"Content-Type": reply.content_type}, content=reply.content)

    served: AbstractContextManager[Address] = endpoint.serving(session) if endpoint else nullcontext(NOWHERE)
    with served as at:
        async with httpx.AsyncClient(transport=Transport(), trust_env=False) as http:
            yield AsyncOpenAI(api_key=at.api_key, base_url=at.base_url, http_client=http, max_retries=0)
