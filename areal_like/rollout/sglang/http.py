"""One SGLang server over HTTP (0.5.17's endpoints)."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import aiohttp
import orjson

from areal_like.errors import ServerError

# A request to a dying server breaks before the server's watcher has said why: let that be heard first.
AFTERMATH_S = 3.0


class Deadline:
    """A time limit that several requests share, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left; never 0, which would mean no limit to a request."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end


class Server:
    """Requests to one SGLang server (0.5.17's endpoints)."""

    def __init__(self, name: str, url: str, session: aiohttp.ClientSession) -> None:
        self.name = name
        self.url = url
        self.in_flight = 0  # sequences
        self._session = session

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        """POST JSON and return the answer's JSON, None where it is empty; raises ServerError."""
        return await self._request("POST", path, orjson.dumps(body), timeout_s)

    async def get(self, path: str, timeout_s: float) -> Any:
        """GET JSON; raises ServerError."""
        return await self._request("GET", path, None, timeout_s)

    async def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        where = f"{self.name} at {self.url}{path}"
        headers = {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=timeout_s, ceil_threshold=math.inf)
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, timeout=limit
            ) as reply:
                answer = await reply.read()
                if reply.status != 200:
                    raise ServerError(f"{where} answered {reply.status}: {answer.decode(errors='replace')[:500]}")
        except TimeoutError:
            raise ServerError(f"{where} did not answer within {timeout_s:.3g} s") from None
        except aiohttp.ClientError as error:
            await asyncio.sleep(AFTERMATH_S)
            raise ServerError(f"{where} failed: {error}") from error
        return orjson.loads(answer) if answer else None

    async def update(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """POST a change of weights; raises ServerError unless the server says that it succeeded."""
        answer = await self.post(path, body, timeout_s)
        if not answer.get("success"):
            raise ServerError(f"{self.name} refused {path}: {answer.get('message', answer)}")
