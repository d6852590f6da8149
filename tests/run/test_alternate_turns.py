"""Who has the GPUs when: trainer and servers take turns, and neither is asked for anything in the other's."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from aiohttp import web
from fake_server import FakeServer, output, serving

from areal_like.core.errors import WeightUpdateError
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Requests, Sampling, ServerPool
from areal_like.core.weights import publish
from areal_like.run.gpu_sharing import Alternate

PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class Trainer:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    async def offload(self, parts: Any = "all") -> None:
        self._told.append(("offload", parts))

    async def onload(self) -> None:
        self._told.append("onload")


class Sync:
    def __init__(self, told: list[Any], pool: ServerPool) -> None:
        self._told, self._pool = told, pool

    async def connect(self) -> None: ...

    async def send(self, version: int, deadline: Deadline) -> None:
        async with self._pool.interrupt(version, Deadline(5)) as servers:
            self._told.append("weights")
            for server in servers:
                await server.load("", version, 5)


async def turns(server: FakeServer, told: list[Any], requests: Requests = "in_place") -> None:
    """Two turns of each, the first one the trainer's; then a response."""
    async with serving(server) as urls, ServerPool(urls, "token", 5, requests=requests) as pool:
        alternate = Alternate(Sync(told, pool), [Trainer(told)], pool, 5, lambda name: nullcontext())
        for version in range(2):
            await alternate.to_trainer(None)
            await publish(alternate, version, 5)
            await alternate.to_servers()
        told += await pool.generate([[1]], Sampling(4))


def fake_server(told: list[Any]) -> FakeServer:
    async def generate(server: FakeServer, body: Any) -> Any:
        return [output([7], 1)]

    server = FakeServer(generate)
    handle = server.handle

    async def noting(request: Any) -> Any:
        if request.path in (PAUSE, CONTINUE, RELEASE, RESUME):
            told.append((request.path, (await request.json()).get("tags") or (await request.json()).get("mode")))
        return await handle(request)

    server.handle = noting
    return server


@pytest.mark.parametrize(("requests", "mode"), [("in_place", "in_place"), ("recompute", "retract")])
def test_no_memory_is_taken_before_the_other_one_has_left(requests: Requests, mode: str):
    told: list[Any] = []
    asyncio.run(turns(fake_server(told), told, requests))
    turn = [
        (PAUSE, mode),
        (RELEASE, ["kv_cache", "weights"]),
        "onload",
        ("offload", ("grads", "optimizer")),
        (RESUME, ["weights"]),
        "weights",
        ("offload", "all"),
        (RESUME, ["kv_cache"]),
        (CONTINUE, None),
    ]
    assert told[:-1] == [*turn, *turn]
    assert told[-1].tokens.tolist() == [7]


def test_a_server_that_keeps_its_memory_is_named():
    async def refusal() -> Any:
        return web.Response(status=400, text="no memory saver")

    told: list[Any] = []
    server = fake_server(told)
    server.answers[RELEASE] = refusal
    with pytest.raises(WeightUpdateError, match=r"releasing the servers' memory failed: server 0 .*no memory saver"):
        asyncio.run(turns(server, told))
    assert "onload" not in told


def test_an_evaluation_has_its_answers_before_the_servers_pause():
    async def run() -> list[Any]:
        told: list[Any] = []
        server = fake_server(told)

        async def answers() -> None:
            await asyncio.sleep(0.05)
            told.append("evaluated")

        async with serving(server) as urls, ServerPool(urls, "token", 5) as pool:
            alternate = Alternate(Sync(told, pool), [Trainer(told)], pool, 5, lambda name: nullcontext())
            await alternate.to_trainer(asyncio.create_task(answers()))
        return told

    assert asyncio.run(run())[0] == "evaluated"
