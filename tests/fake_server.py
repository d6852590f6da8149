"""A server that answers SGLang's endpoints as a test tells it to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from areal_like.rollout.http import Deadline
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.labels import LABELS
from areal_like.rollout.sglang.patches.columns import with_columns

Body = dict[str, Any]
Answer = Any


class FakeServer:
    """`on_generate(server, body)` answers `/generate`; other endpoints succeed unless `answers` has another answer."""

    def __init__(self, on_generate: Callable[[FakeServer, Body], Awaitable[Answer]] | None = None) -> None:
        self.version = "0"
        self.requests: list[tuple[str, Body]] = []
        self.answers: dict[str, Callable[[], Awaitable[Answer]]] = {}
        self.url = ""
        self.is_paused = False  # what `on_generate` may heed
        self.most_running = 256
        self.work_done = 0  # tokens
        self.running, self.waiting, self.kv_use = 1, 1, 0.1  # as it says
        self._on_generate = on_generate

    def bodies(self, path: str) -> list[Body]:
        """What was posted to `path`, in order."""
        return [body for posted, body in self.requests if posted == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json() if request.can_read_body else {}
        self.requests.append((path, body))
        if path in self.answers:
            answer = await self.answers[path]()
        elif path == "/generate":
            assert self._on_generate is not None
            answer = await self._on_generate(self, body)
            if isinstance(answer, list):
                return await events(request, answer)
            if callable(answer):
                return await answer(request)
        elif path == "/model_info":
            answer = {"weight_version": self.version}
        elif path == "/server_info":
            answer = {"internal_states": [{"effective_max_running_requests_per_dp": self.most_running}]}
        elif path == "/v1/loads":
            counts = {"num_running_reqs": self.running, "num_waiting_reqs": self.waiting, "token_usage": self.kv_use}
            work = {"num_total_tokens": self.work_done, "total_prefill_uncached_tokens": 1}
            answer = {"loads": [counts | work]}
        elif path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
            return web.Response()
        else:
            self.version = body.get("weight_version") or self.version
            answer = {"success": True, "message": "done"}
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


async def events(request: web.Request, answers: Sequence[Answer]) -> web.StreamResponse:
    """One event for each of a request's inputs."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for place, answer in enumerate(answers):
        await response.write(event(place, answer))
    await response.write(b"data: [DONE]\n\n")
    return response


def event(place: int, answer: Answer) -> bytes:
    """A server-sent event about input `place`, as SGLang streams it."""
    return b"data: " + json.dumps({"index": place} | answer if isinstance(answer, dict) else answer).encode() + b"\n\n"


def output(
    tokens: Sequence[int],
    version: int | str = 0,
    reason: str | None = "stop",
    status_code: int | None = None,
    versions: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """One response as a server streams it; token t has log-prob -t; `versions` made the tokens, or `version` all."""
    finish: dict[str, Any] | None = {"type": reason} if reason else None
    if finish and status_code:
        finish |= {"status_code": status_code, "message": "no room"}
    answer = {
        "meta_info": {
            "weight_version": str(version),
            LABELS: [str(version)] * len(tokens) if versions is None else versions,
            "finish_reason": finish,
            "output_token_logprobs": [[-float(token), token, None] for token in tokens],
        }
    }
    return dict(with_columns(answer))


@asynccontextmanager
async def serving(*servers: FakeServer) -> AsyncIterator[list[str]]:
    """Serve each on a free loopback port while the body runs; gives their URLs."""
    runners = []
    try:
        for server in servers:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", server.handle)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield [server.url for server in servers]
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def open_pool(server: FakeServer) -> AsyncIterator[ServerPool]:
    """A pool of one server that holds version 0."""
    async with serving(server) as urls, ServerPool(urls, "token", 300) as pool:
        async with pool.interrupt(0, Deadline(300)):
            pass
        yield pool
