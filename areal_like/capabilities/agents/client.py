"""`openai.AsyncOpenAI` clients whose requests are answered by a function, without an open port."""

import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from areal_like.capabilities.agents.replies import Reply

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NOWHERE = "http://areal-like.invalid/v1"  # a name that never resolves (RFC 2606)

type Answer = Callable[[str, str, Mapping[str, str], bytes], Awaitable[Reply]]
"""Answer an HTTP request: method, path, headers in lower case, body."""


class Clients:
    """A factory of clients. `base_url` is the URL for other processes, if there is one.

    Creating an OpenAI client takes as long as a request, and so does an HTTP client's handling of redirects and
    cookies. All clients are copies of one without these.
    """

    def __init__(self, answer: Answer, base_url: str | None = None) -> None:
        import httpx
        from openai import AsyncOpenAI

        class Answered(httpx.AsyncClient):
            async def send(self, request: httpx.Request, **_: Any) -> httpx.Response:
                body = await request.aread()
                reply = await answer(request.method, request.url.path, request.headers, body)
                headers = {"Content-Type": reply.content_type}
                return httpx.Response(reply.status, headers=headers, content=reply.content, request=request)

        http = Answered(trust_env=False)
        self._original = AsyncOpenAI(api_key="none", base_url=base_url or NOWHERE, http_client=http, max_retries=0)

    async def warm_up(self) -> None:
        """Send one request without an answer, because a client detects its platform on its first request."""
        from openai import APIError

        try:
            await self._original.get("/models", cast_to=object)
        except APIError:
            return

    def with_key(self, key: str) -> "AsyncOpenAI":
        """Return a client with this API key."""
        client = copy.copy(self._original)
        client.api_key = key
        return client
