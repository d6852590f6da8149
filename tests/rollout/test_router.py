"""Servers that fail, stand still, leave and join: every response is whole, and nobody waits in vain."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_server import Body, FakeServer, output, serving
from limits import HUNG_S

from areal_like.backends import http
from areal_like.backends.sglang.server import SGLangClient
from areal_like.core.errors import ServerError
from areal_like.core.rollout import dispatch, router
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import ASKED, Sampling, ServerPool
from areal_like.core.rollout.server import Load

STOP = 7
SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=(STOP,))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "PAUSE_S", 0.02)
    monkeypatch.setattr(router, "TOGETHER", 1)  # a sample is an HTTP request; one test has several in one
    monkeypatch.setattr(http, "AFTERMATH_S", 0.02)


@asynccontextmanager
async def pool_of(*servers: FakeServer, timeout_s: float = 30) -> AsyncIterator[ServerPool]:
    """A pool that holds version 0."""
    async with (
        serving(*servers) as urls,
        ServerPool(urls, "token", timeout_s) as pool,
    ):
        async with pool.interrupt(0, Deadline(5)):
            pass
        yield pool


async def answer(server: FakeServer, body: Body) -> Any:
    """Three tokens, of which the prompt's own is the middle one."""
    return [output([3, prompt[0], STOP], server.version) for prompt in body["input_ids"]]


async def error(server: FakeServer, body: Body) -> Any:
    return web.Response(status=503, text="not now")


async def hang_up(server: FakeServer, body: Body) -> Any:
    raise ConnectionResetError


def test_two_runs_never_ask_a_server_under_the_same_id() -> None:
    """A server may abort the ids of a run that has ended, after the next one has begun."""
    ids: list[str] = []

    async def note(server: FakeServer, body: Body) -> Any:
        ids.extend(body["rid"])
        return await answer(server, body)

    async def generate() -> None:
        async with pool_of(FakeServer(note)) as pool:
            await pool.generate([[1], [2]], SAMPLING)

    for _ in range(2):
        asyncio.run(generate())
    assert len(set(ids)) == 4


async def half_an_answer(server: FakeServer, body: Body) -> Any:
    return web.Response(body=b'[{"meta_info": ')


async def silence(server: FakeServer, body: Body) -> Any:
    await asyncio.sleep(600)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("failure", [error, hang_up, half_an_answer, silence])
def test_a_request_that_fails_is_asked_again(failure: Any, servers: int):
    asked = 0

    async def generate(server: FakeServer, body: Body) -> Any:
        nonlocal asked
        asked += 1
        return await (failure if asked % 10 == 3 else answer)(server, body)

    async def run() -> list:
        async with pool_of(*(FakeServer(generate) for _ in range(servers)), timeout_s=0.4) as pool:
            return await asyncio.gather(*(pool.generate([[prompt]], SAMPLING) for prompt in range(20, 60)))

    for prompt, (response,) in zip(range(20, 60), asyncio.run(run()), strict=True):
        assert response.tokens.tolist() == [3, prompt, STOP]
    assert asked > 40


@pytest.mark.parametrize("in_an_event", [True, False])
def test_a_request_that_is_wrong_takes_none_with_it(in_an_event: bool, monkeypatch: pytest.MonkeyPatch):
    """SGLang refuses an HTTP request as a whole where one of its prompts is too long."""
    monkeypatch.setattr(router, "TOGETHER", 32)
    said = {"error": {"message": "the prompt is too long", "code": 400}}

    async def generate(server: FakeServer, body: Body) -> Any:
        if max(map(len, body["input_ids"])) == 1:
            return await answer(server, body)
        return [said] if in_an_event else web.json_response(said, status=400)

    async def run() -> list[Any]:
        async with pool_of(FakeServer(generate)) as pool:
            asking = [pool.sample([20] * (1 + (place == 2)), SAMPLING) for place in range(5)]
            return await asyncio.gather(*asking, return_exceptions=True)

    wrong = asyncio.run(run())
    with pytest.raises(ServerError, match="the prompt is too long"):
        raise wrong.pop(2)
    assert [response.tokens.tolist() for response in wrong] == [[3, 20, STOP]] * 4


def test_a_request_that_cannot_be_sent_says_why_and_takes_none_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router, "TOGETHER", 32)

    async def run() -> list[Any]:
        async with pool_of(FakeServer(answer)) as pool:
            asking = [pool.sample([20], SAMPLING, seed=seed) for seed in (1, 2**70)]
            return await asyncio.gather(*asking, return_exceptions=True)

    good, wrong = asyncio.run(run())
    assert good.tokens.tolist() == [3, 20, STOP]
    with pytest.raises(ServerError, match="cannot be written as JSON: Integer exceeds"):
        raise wrong


@pytest.mark.parametrize("path", ["/v1/loads", "/server_info", "/model_info", "/update_weights_from_disk"])
@pytest.mark.parametrize("garbage", [{}, [], None, "yes", {"loads": [1], "internal_states": 3}])
def test_a_server_that_answers_garbage_is_named(path: str, garbage: Any):
    async def say() -> Any:
        return web.json_response(garbage)

    async def run() -> None:
        server = FakeServer()
        server.answers[path] = say
        async with serving(server) as (url,), aiohttp.ClientSession() as session:
            bad = SGLangClient("server 3", url, session)
            ask = {"/v1/loads": bad.work_done, "/server_info": bad.most_running, "/model_info": bad.weight_version}
            await (ask[path](5) if path in ask else bad.load("", 0, 5))

    with pytest.raises(ServerError, match=rf"server 3 .*{path}"):
        asyncio.run(run())


def test_waiting_for_a_turn_is_no_silence_and_the_oldest_goes_first():
    """A server that runs four at once, and more work than it does within the time limit."""
    running, most, begun = asyncio.Semaphore(4), 0, []

    async def generate(server: FakeServer, body: Body) -> Any:
        nonlocal most
        begun.append(body["input_ids"][0][0])
        most = max(most, len(begun) - done)
        async with running:
            await asyncio.sleep(0.2)
        return await answer(server, body)

    done = 0

    async def one(pool: ServerPool, group: int) -> None:
        nonlocal done
        await pool.generate([[group]], SAMPLING, priority=group)
        done += 1

    async def run() -> float:
        server = FakeServer(generate)
        server.most_running = 4
        async with pool_of(server, timeout_s=1.2) as pool:
            start = asyncio.get_running_loop().time()
            await asyncio.gather(*(one(pool, group) for group in reversed(range(40))))
            return asyncio.get_running_loop().time() - start

    assert asyncio.run(run()) > 1.9
    assert len(begun) == 40, "a request was sent twice"
    room = math.ceil(dispatch.AHEAD * 4)
    assert most <= room
    first, later = begun[:room], begun[room:]
    assert first == list(reversed(range(40 - room, 40)))  # there was room when they came
    assert later == sorted(later)


def test_a_long_answer_may_come_late_as_long_as_the_server_works():
    async def generate(server: FakeServer, body: Body) -> Any:
        for _ in range(20):
            await asyncio.sleep(0.05)
            server.work_done += 1
        return await answer(server, body)

    async def run() -> None:
        server = FakeServer(generate)
        async with pool_of(server, timeout_s=0.4) as pool:
            start = time.monotonic()
            await pool.generate([[1]], SAMPLING)
            seconds = time.monotonic() - start
        assert len(server.bodies("/generate")) == 1
        assert len(server.bodies("/v1/loads")) <= seconds / 0.1

    asyncio.run(run())


@pytest.mark.parametrize(("kv_holds", "samples"), [(8, 60), (100, 60)])
def test_a_server_is_sent_what_its_kv_cache_holds_and_a_little_more(kv_holds: int, samples: int, monkeypatch: Any):
    """It could run 40 at once; of what comes beyond its KV cache it says that it waits."""
    monkeypatch.setattr(router, "LOAD_S", 0.02)
    monkeypatch.setattr(dispatch, "GROWTH", 1)  # samples take seconds, not milliseconds
    there: list[int] = []

    def say(server: FakeServer, change: int) -> None:
        at_once = (there[-1] if there else 0) + change
        there.append(at_once)
        server.running, server.waiting = min(at_once, kv_holds, 40), max(0, at_once - min(kv_holds, 40))
        server.kv_use = server.running / kv_holds

    async def generate(server: FakeServer, body: Body) -> Any:
        say(server, 1)
        await asyncio.sleep(random.uniform(0.1, 0.3))
        say(server, -1)
        return await answer(server, body)

    async def run() -> int:
        server = FakeServer(generate)
        server.most_running = 40
        async with pool_of(server) as pool:
            while kv_holds < 40 and pool._router._states[0].capacity > math.ceil(dispatch.AHEAD * kv_holds):
                await asyncio.gather(*(pool.sample([number], SAMPLING) for number in range(samples)))
                there.clear()
            await asyncio.gather(*(pool.sample([number], SAMPLING) for number in range(samples)))
            assert 0 <= pool.statistics()["rollout/kv_use"] <= 1
            return pool._router._states[0].capacity

    room = asyncio.run(run())
    assert max(there) <= math.ceil(dispatch.AHEAD * min(kv_holds, 40)) + (kv_holds < 40)  # it said so a moment ago
    assert room == math.ceil(dispatch.AHEAD * min(kv_holds, 40))


def test_the_long_and_few_at_the_end_of_a_step_take_no_room_from_the_next():
    async def run() -> list[int]:
        state = dispatch.ServerState(SGLangClient("server 0", "", None), most=320, capacity=320, in_flight=6)  # type: ignore[arg-type]
        rooms = []
        for running, waiting in ((6, 0), (6, 2), (6, 2)):
            state.follow(Load(running, waiting, kv_use=0.9))
            rooms.append(state.capacity)
        return rooms

    assert asyncio.run(run()) == [320, 160, 80]


def test_a_busy_server_is_seldom_asked_how_it_is():
    async def generate(server: FakeServer, body: Body) -> Any:
        await asyncio.sleep(0.1)
        return await answer(server, body)

    async def run() -> None:
        server = FakeServer(generate)
        start = time.monotonic()
        async with pool_of(server, timeout_s=HUNG_S) as pool:
            await asyncio.gather(*(pool.generate([[1]], SAMPLING) for _ in range(300)))
        assert len(server.bodies("/v1/loads")) <= 1 + (time.monotonic() - start) / router.LOAD_S

    asyncio.run(run())


def test_what_a_server_that_stands_still_has_goes_on_elsewhere():
    """The other one begins to answer when each has its half, so that the first has no less."""

    async def answer_then(server: FakeServer, body: Body) -> Any:
        while len(stuck.bodies("/generate")) < 15:
            await asyncio.sleep(0.01)
            server.work_done += 1
        return await answer(server, body)

    stuck, good = FakeServer(silence), FakeServer(answer_then)

    async def run() -> list:
        async with pool_of(stuck, good, timeout_s=3) as pool:
            return await asyncio.gather(*(pool.generate([[prompt]] * 3, SAMPLING) for prompt in range(20, 30)))

    assert all(len(response.tokens) == 3 for group in asyncio.run(run()) for response in group)
    # after its failure it had to answer one before it would have been sent more
    assert 15 <= len(stuck.bodies("/generate")) <= 19
    assert len(good.bodies("/generate")) == 30


def test_a_server_may_fail_as_often_as_it_likes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router, "LONGEST_PAUSE_S", 0.02)

    async def generate(server: FakeServer, body: Body) -> Any:
        return await (error if len(server.bodies("/generate")) == 1 else answer)(server, body)

    async def run() -> None:
        async with pool_of(FakeServer(generate)) as pool:
            pool._router._states[0].failures = 5000
            assert (await pool.sample([20], SAMPLING)).tokens.tolist() == [3, 20, STOP]

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_server_that_stands_still_is_told_of_once(leaves: bool, monkeypatch: pytest.MonkeyPatch):
    """Although two of its requests ask at the same time what it did, and both hear that it was nothing."""
    asking, told = 0, []

    async def work_done(server: SGLangClient, limit_s: float) -> None:
        nonlocal asking
        asking += 1
        while asking < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)

    async def run() -> None:
        async with pool_of(FakeServer(silence), FakeServer(answer), timeout_s=0.2) as pool:
            stuck = pool.servers[0]

            def tell(server: SGLangClient) -> None:
                told.append(server is stuck)
                if leaves:
                    pool.leave(server)

            pool.on_hang(tell)
            await asyncio.gather(*(pool.sample([prompt], SAMPLING) for prompt in range(20, 24)))
            await asyncio.sleep(0.1)

    monkeypatch.setattr(SGLangClient, "work_done", work_done)
    asyncio.run(run())
    assert told == [True]


def test_a_server_that_leaves_hands_its_requests_on_and_is_sent_no_more():
    leaving, staying = FakeServer(silence), FakeServer(answer)

    async def run() -> None:
        async with pool_of(leaving, staying) as pool:
            asking = [asyncio.create_task(pool.generate([[prompt]], SAMPLING)) for prompt in range(20, 26)]
            while len(leaving.bodies("/generate")) < 3:
                await asyncio.sleep(0.01)
            pool.leave(pool.servers[0])
            for group in await asyncio.gather(*asking):
                assert group[0].tokens.tolist()[::2] == [3, STOP]
            await pool.generate([[1]], SAMPLING)
            async with pool.interrupt(1, Deadline(5)):
                assert [server.name for server in pool.servers] == ["server 1"]
                staying.version = "1"
        asked = [body["input_ids"][0][0] for body in staying.bodies("/generate")]
        assert sorted(asked) == [1, *range(20, 26)]
        assert leaving.version == "0"

    asyncio.run(run())


def test_requests_of_a_server_share_no_future():
    """To remove one callback of a future, asyncio compares it with all of them."""
    requests, most = 50, 0

    async def run() -> None:
        nonlocal most
        may_end = asyncio.Event()

        async def generate(server: FakeServer, body: Body) -> Any:
            await may_end.wait()
            return await answer(server, body)

        server = FakeServer(generate)
        server.most_running = requests
        async with pool_of(server) as pool:
            asking = [asyncio.create_task(pool.sample([20], SAMPLING)) for _ in range(requests)]
            while len(server.bodies("/generate")) < requests:
                await asyncio.sleep(0.01)
            futures = [each for each in gc.get_objects() if isinstance(each, asyncio.Future) and not each.done()]
            most = max(len(future._callbacks or ()) for future in futures)
            assert sum(bool(future._callbacks) for future in futures) > requests
            may_end.set()
            await asyncio.gather(*asking)

    asyncio.run(run())
    assert most < requests


def test_requests_end_when_nobody_is_left():
    async def run() -> None:
        only = FakeServer(silence)
        only.most_running = 1
        async with pool_of(only) as pool:
            asking = [asyncio.create_task(pool.generate([[1]], SAMPLING)) for _ in range(5)]
            while len(only.bodies("/generate")) < 2:
                await asyncio.sleep(0.01)
            pool.leave(pool.servers[0])
            for task in asking:
                with pytest.raises(ServerError, match="no server is left"):
                    await task

    asyncio.run(run())


def test_a_server_joins_with_the_next_version():
    first, second = FakeServer(answer), FakeServer(answer)

    async def run() -> None:
        async with pool_of(first) as pool, serving(second) as (url,):
            pool.join(url, 1)
            await pool.generate([[1]], SAMPLING)
            assert second.requests == []
            async with pool.interrupt(1, Deadline(5)):
                assert [server.url for server in pool.servers] == [first.url, url]
                first.version = second.version = "1"
            responses = await asyncio.gather(*(pool.generate([[1]], SAMPLING) for _ in range(4)))
            assert {version for (response,) in responses for version in response.versions} == {1}
            assert len(second.bodies("/generate")) == 2

    asyncio.run(run())


def test_who_gives_up_waiting_takes_no_room():
    async def run() -> None:
        may_end = asyncio.Event()

        async def generate(server: FakeServer, body: Body) -> Any:
            await may_end.wait()
            return await answer(server, body)

        server = FakeServer(generate)
        server.most_running = 1
        async with pool_of(server) as pool:
            asking = [asyncio.create_task(pool.generate([[prompt]], SAMPLING)) for prompt in range(20, 25)]
            while len(server.bodies("/generate")) < dispatch.AHEAD:
                await asyncio.sleep(0.01)
            for task in (asking[0], asking[3]):  # one was sent, one waits
                task.cancel()
            may_end.set()
            await asyncio.gather(*asking, return_exceptions=True)
            assert [len(task.result()) for task in asking if not task.cancelled()] == [1, 1, 1]
            assert not pool._router.busy
            assert len(server.bodies("/generate")) == 4

    asyncio.run(run())


def test_a_server_that_leaves_while_all_are_on_hold_is_not_missed():
    async def run() -> None:
        leaving, staying = FakeServer(answer), FakeServer(answer)
        async with pool_of(leaving, staying) as pool:
            await pool.hold(Deadline(5))
            pool.leave(pool.servers[0], "was lost")
            await pool.take_weights_back(Deadline(5))
            async with pool.interrupt(1, Deadline(5)):
                staying.version = "1"
            await pool.release_hold(Deadline(5))
            assert (await pool.sample([20], SAMPLING)).versions.tolist() == [1, 1, 1]

    asyncio.run(run())


def test_hundreds_of_servers_are_not_asked_in_one_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    turns, begun = 0, Counter[int]()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    request = aiohttp.ClientSession.request

    def counted(*args: Any, **settings: Any) -> Any:
        begun[turns] += 1
        return request(*args, **settings)

    async def run() -> None:
        counting = asyncio.create_task(count())
        server = FakeServer(answer)
        async with (
            serving(server) as (url,),
            ServerPool([url] * 200, "token", HUNG_S) as pool,
            pool.interrupt(0, Deadline(HUNG_S)),
        ):
            pass
        counting.cancel()

    monkeypatch.setattr(aiohttp.ClientSession, "request", counted)
    asyncio.run(run())
    assert begun.total() >= 4 * 200
    assert max(begun.values()) <= 2 * ASKED
