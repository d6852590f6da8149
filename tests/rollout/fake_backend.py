"""A backend of servers that answer with random tokens; a test adds this file as `backend.py` of a folder."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from areal_like.backends.http import Connection, encode
from areal_like.backends.ray.placement import url as url_of
from areal_like.core.rollout.backends import ServerBackend
from areal_like.core.rollout.server import Generation, Load, Part, ServerSpec
from areal_like.core.types import FinishReason, Piece


class FakeActor:
    """A server in the process of its Ray actor."""

    def __init__(self, spec: ServerSpec, host: str) -> None:
        self._host, self._token, self._vocabulary = host, spec.token, int(spec.arguments[0])
        self._version, self._made = "", 0

    async def start(self) -> str:
        """Listen, and return the URL."""
        app = web.Application()
        app.add_routes(
            [web.post("/sample", self._sample), web.post("/version", self._set), web.get("/state", self._tell)]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        return url_of(self._host, self._runner.addresses[0][1])

    async def watch(self) -> None:
        """Return never."""
        await asyncio.Event().wait()

    async def end(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {self._token}"
        answer = web.StreamResponse()
        await answer.prepare(request)
        for place, count in enumerate(await request.json()):
            tokens = [random.randrange(self._vocabulary) for _ in range(count)]
            event = {"place": place, "tokens": tokens, "version": int(self._version)}
            event["logprob"] = -float(np.log(self._vocabulary))
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self._made += count
        return answer

    async def _set(self, request: web.Request) -> web.Response:
        self._version = str(await request.json())
        return web.json_response({"success": True})

    async def _tell(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self._version, "made": self._made})


class FakeClient:
    """The client of a fake server: the methods of Server that a run on a CPU with `weight_update.mode=disk` calls."""

    group = None

    def __init__(self, name: str, url: str, session: Any, rank: int | None = None, *others: Any, **more: Any) -> None:
        self.name, self.url, self.rank = name, url, rank
        self._connection = Connection(name, url, session, *others, **more)
        self.left, self.leave = self._connection.left, self._connection.leave

    def generate(self, request: Generation) -> AsyncGenerator[list[bytes]]:
        """Ask for as many tokens as each input may have."""
        return self._connection.stream("/sample", encode([params["max_new_tokens"] for params in request.params]))

    def part_of(self, event: bytes) -> Part:
        """Read the response to one input."""
        news = orjson.loads(event)
        count = len(news["tokens"])
        logprobs = np.full(count, news["logprob"], np.float32).view(np.int32)
        columns = np.stack([np.array(news["tokens"], np.int32), logprobs, np.full(count, news["version"], np.int32)])
        return news["place"], Piece(columns, FinishReason.LENGTH)

    async def abort(self, rid: str, timeout_s: float) -> None: ...

    async def pause(self, timeout_s: float, *, retract: bool = False) -> None: ...

    async def resume(self, timeout_s: float) -> None: ...

    async def load(self, path: str, version: int | str, timeout_s: float) -> None:
        """Take over a version."""
        await self._connection.update("/version", version, timeout_s)

    async def weight_version(self, timeout_s: float) -> str:
        """Return the version."""
        return (await self._connection.get("/state", timeout_s))["version"]

    async def work_done(self, timeout_s: float) -> Any:
        """Return the number of tokens."""
        return (await self._connection.get("/state", timeout_s))["made"]

    async def most_running(self, timeout_s: float) -> int:
        """Return a constant."""
        return 64

    async def current_load(self, timeout_s: float) -> Load:
        """Return no load."""
        return Load(0, 0, 0.0)


def arguments(config: Any, model: Any, *_: Any) -> tuple[str, ...]:
    """Return the size of the vocabulary."""
    return (str(json.loads((model / "config.json").read_text())["vocab_size"]),)


BACKEND = ServerBackend(connect=FakeClient, actor=FakeActor, arguments=arguments, letters="d")
