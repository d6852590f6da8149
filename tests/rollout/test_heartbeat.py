"""A host that is silent is lost with its servers long before Ray says so; one that is busy or refuses is not."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from fake_server import FakeServer, serving
from limits import HUNG_S
from test_supervisor import SAMPLING, STOP, Actors, generate, opened, silence, until

from areal_like.backends import http
from areal_like.backends.http import Connection
from areal_like.backends.ray import heartbeat
from areal_like.backends.ray.heartbeat import wait_for_silence
from areal_like.core.errors import ServerError
from areal_like.core.rollout.http import session
from areal_like.core.rollout.pool import ServerPool
from areal_like.run.supervisor import ServerSupervisor


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ports whose host is cut off: connections to them are neither accepted nor refused."""
    ports: set[int] = set()
    connect = asyncio.open_connection

    async def open_connection(host: str, port: int) -> Any:
        if port in ports:
            await asyncio.sleep(HUNG_S)
        return await connect(host, port)

    monkeypatch.setattr(heartbeat.asyncio, "open_connection", open_connection)
    return ports


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EADDRNOTAVAIL])
def test_an_error_of_this_host_is_no_silence_of_the_other(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(heartbeat.asyncio, "open_connection", AsyncMock(side_effect=OSError(code, "here")))
    assert asyncio.run(heartbeat.answers("http://127.0.0.1:9", HUNG_S))
    assert asyncio.run(heartbeat.accepts("http://127.0.0.1:9", HUNG_S))


def test_a_host_without_a_route_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.asyncio, "open_connection", AsyncMock(side_effect=OSError(errno.EHOSTUNREACH, "")))
    assert not asyncio.run(heartbeat.answers("http://127.0.0.1:9", HUNG_S))


def test_a_host_whose_process_has_ended_answers_and_does_not_accept() -> None:
    assert asyncio.run(heartbeat.answers("http://127.0.0.1:9", HUNG_S))
    assert not asyncio.run(heartbeat.accepts("http://127.0.0.1:9", HUNG_S))


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_only_a_host_that_neither_accepts_nor_refuses_is_silent(cut: set[int]) -> None:
    async def run() -> None:
        async with serving(FakeServer(silence)) as (url,):
            asking = [asyncio.create_task(wait_for_silence(each, 0.2)) for each in (url, "http://127.0.0.1:9")]
            await asyncio.sleep(1)
            assert not any(task.done() for task in asking)
            cut.add(port_of(url))
            start = time.monotonic()
            await asyncio.wait_for(asking[0], HUNG_S)
            assert time.monotonic() - start > 0.1
            assert not asking[1].done()
            asking[1].cancel()

    asyncio.run(run())


def test_a_cut_that_heals_in_time_costs_nothing(cut: set[int]) -> None:
    async def run() -> None:
        async with serving(FakeServer(silence)) as (url,):
            asking = asyncio.create_task(wait_for_silence(url, 60))
            for _ in range(3):
                cut.add(port_of(url))
                await asyncio.sleep(0.2)
                cut.clear()
                await asyncio.sleep(0.2)
            assert not asking.done()
            asking.cancel()

    asyncio.run(run())


def test_requests_of_a_lost_host_continue_elsewhere_and_its_server_is_replaced(cut: set[int]) -> None:
    async def run() -> None:
        lost, other, again, said = FakeServer(silence), FakeServer(generate), FakeServer(generate), []
        async with serving(lost, other, again) as urls, ServerPool(urls[:2], "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors(urls[2])
            keeping = ServerSupervisor(actors, pool, 3, 1, said.append, actors.replace, 0.3)  # type: ignore[arg-type]
            watching = asyncio.create_task(keeping.keep())
            asking = [asyncio.create_task(pool.sample([9, n], SAMPLING)) for n in range(20)]
            await until(lambda: bool(lost.bodies("/generate")))
            cut.add(port_of(urls[0]))
            for response in await asyncio.gather(*asking):
                assert response.tokens.tolist() == [3, STOP]
            await until(lambda: len(pool.servers) == 2)
            assert said[0].startswith("host 10.0.0.7 did not answer for 0.3 s (cluster.host_timeout_s). 1 server")
            assert (actors.killed, actors.replaced) == ([0], [0])
            await opened(pool, 1, other, again)
            assert [server.url for server in pool.serving] == [other.url, again.url]
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ECONNRESET])
def test_a_failure_waits_for_the_report_that_its_host_is_lost(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With it an update goes on without that server; before it, the update and so the run would end."""
    monkeypatch.setattr(http, "AFTERMATH_S", 0.05)

    async def fail(*_: Any, **__: Any) -> Any:
        key = ConnectionKey("h", 1, False, True, None, None, None)
        raise aiohttp.ClientConnectorError(key, OSError(number, "gone"))

    async def run() -> None:
        async with session("token") as requests:
            monkeypatch.setattr(requests, "_request", fail)
            connection = Connection("server 0", "http://10.0.0.7:1", requests, host_timeout_s=HUNG_S)
            asking = asyncio.create_task(connection.get("/x", 5))
            await asyncio.sleep(0.5)
            assert asking.done() == (number == errno.ECONNRESET)
            connection.leave("was lost with its host")
            with pytest.raises(ServerError, match=r"gone|was lost with its host"):
                await asking

    asyncio.run(run())
