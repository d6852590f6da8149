"""Requests to servers: what an interruption cuts is continued, and nothing that is wrong passes for an answer."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
from aiohttp import web
from fake_server import Body, FakeServer, event, open_pool, output, serving
from limits import HUNG_S
from tolerance import assert_close

from areal_like.backends import http as client
from areal_like.core.errors import ServerError
from areal_like.core.rollout import router
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import LONG_PROMPT, MOST_TRIES, Response, Sampling, ServerPool
from areal_like.core.rollout.sample import CHUNK
from areal_like.core.rollout.single_turn import sample_seeds
from areal_like.core.types import FinishReason

STOP = 7
SAMPLING = Sampling(max_new_tokens=6, temperature=0.7, top_p=1.0, stop_token_ids=(STOP,))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "PAUSE_S", 0.02)
    monkeypatch.setattr(client, "AFTERMATH_S", 0.02)


def content(response: Response) -> tuple[list[int], list[float], list[int], FinishReason | None]:
    assert [array.dtype for array in (response.tokens, response.logprobs, response.versions)] == ["i4", "f4", "i4"]
    return (
        response.tokens.tolist(),
        response.logprobs.tolist(),
        response.versions.tolist(),
        response.finish_reason,
    )


async def ask(*servers: FakeServer, prompts: int = 1, timeout_s: float = 300) -> list[Response]:
    """Generate from version 0."""
    async with serving(*servers) as urls, ServerPool(urls, "token", timeout_s) as pool:
        async with pool.interrupt(0, Deadline(300)):
            pass
        responses = await pool.generate([[1, 2]] * prompts, SAMPLING)
        assert not pool._router.busy
        return responses


def test_servers_pause_when_they_have_said_that_they_live():
    paused: list[bool] = []

    async def slow_answer() -> Any:
        await asyncio.sleep(0.05)
        paused.append(server.is_paused)
        return {"internal_states": [{"effective_max_running_requests_per_dp": 1}]}

    async def run() -> None:
        async with serving(server) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            server.answers["/server_info"] = slow_answer
            async with pool.interrupt(0, Deadline(HUNG_S)):
                assert server.is_paused
                while not paused:
                    await asyncio.sleep(0.01)

    server = FakeServer()
    asyncio.run(run())
    assert paused[0] is False


def test_a_request_says_what_to_sample():
    async def generate(server: FakeServer, body: Body) -> Any:
        return [output([3, 4, STOP])]

    server = FakeServer(generate)
    (response,) = asyncio.run(ask(server))
    assert content(response) == ([3, 4, STOP], [-3.0, -4.0, -7.0], [0, 0, 0], FinishReason.STOP)
    (body,) = server.bodies("/generate")
    assert body["input_ids"] == [[1, 2]]
    assert body["return_logprob"] is True
    assert body["sampling_params"] == [
        {"max_new_tokens": 6, "temperature": 0.7, "top_p": 1.0, "stop_token_ids": [STOP], "stream_interval": -CHUNK}
    ]


def test_an_update_leaves_requests_where_they_are_and_each_token_has_its_version():
    started, paused, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(server: FakeServer, body: Body) -> Any:
        started.set()
        await may_end.wait()
        return [
            output([3, STOP], 1, versions=["0", "0"]),
            output([3, 4, 5, STOP], 1, versions=["0", "0", "1", "1"]),
            output([6] * 6, 1, "length"),
        ]

    async def pause() -> Any:
        paused.set()

    async def run() -> list[Response]:
        server = FakeServer(generate)
        async with open_pool(server) as pool:
            asking = asyncio.create_task(pool.generate([[1, 2]] * 3, SAMPLING))
            await started.wait()
            server.requests.clear()
            server.answers["/pause_generation"] = pause
            async with pool.interrupt(1, Deadline(300)):
                assert paused.is_set()
                assert server.bodies("/continue_generation") == []
                server.version = "1"
            may_end.set()
            responses = await asking
        waited_for = [path for path, _ in server.requests if path != "/server_info"]  # for which nothing waits
        assert waited_for[:3] == [
            "/pause_generation",
            "/continue_generation",
            "/model_info",  # nothing waits for the answer
        ]
        assert server.bodies("/pause_generation") == [{"mode": "in_place"}]
        assert server.bodies("/generate") == []  # it was not asked again
        return responses

    ended, mixed, later = asyncio.run(run())
    assert content(ended) == ([3, STOP], [-3.0, -7.0], [0, 0], FinishReason.STOP)
    assert content(mixed) == ([3, 4, 5, STOP], [-3.0, -4.0, -5.0, -7.0], [0, 0, 1, 1], FinishReason.STOP)
    assert content(later) == ([6] * 6, [-6.0] * 6, [1] * 6, FinishReason.LENGTH)


def test_recompute_has_the_servers_prefill_again():
    async def run() -> None:
        server = FakeServer()
        async with (
            serving(server) as urls,
            ServerPool(urls, "token", 300, requests="recompute") as pool,
            pool.interrupt(0, Deadline(300)),
        ):
            assert server.bodies("/pause_generation") == [{"mode": "retract"}]

    asyncio.run(run())


def test_drain_waits_for_what_is_in_flight_and_lets_nothing_follow():
    started, may_end = asyncio.Event(), asyncio.Event()

    async def generate(server: FakeServer, body: Body) -> Any:
        started.set()
        await may_end.wait()
        return [output([STOP], server.version)]

    async def run() -> None:
        server = FakeServer(generate)

        async def update(pool: ServerPool) -> None:
            async with pool.interrupt(1, Deadline(300)):
                assert len(server.bodies("/generate")) == 1
                server.version = "1"

        async with serving(server) as urls, ServerPool(urls, "token", 300, requests="drain") as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            first = asyncio.create_task(pool.generate([[1]], SAMPLING))
            await started.wait()
            updated = asyncio.create_task(update(pool))
            await asyncio.sleep(0.1)
            late = asyncio.create_task(pool.generate([[1]], SAMPLING))
            await asyncio.sleep(0.3)
            assert not updated.done()
            may_end.set()
            await updated
            assert [(await task)[0].versions.tolist() for task in (first, late)] == [[0], [1]]

    asyncio.run(run())


def test_a_paused_server_is_not_taken_for_one_that_stands_still():
    started, continued = asyncio.Event(), asyncio.Event()

    async def generate(server: FakeServer, body: Body) -> Any:
        started.set()
        await continued.wait()
        return [output([STOP], 1)]

    async def go_on() -> Any:
        continued.set()

    async def run() -> None:
        server = FakeServer(generate)
        async with serving(server) as urls, ServerPool(urls, "token", 0.4) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            asking = asyncio.create_task(pool.generate([[1]], SAMPLING))
            await started.wait()
            server.answers["/continue_generation"] = go_on
            async with pool.interrupt(1, Deadline(300)):
                await asyncio.sleep(1)
                server.version = "1"
            await asking
            assert pool.pause_s >= 1
        assert len(server.bodies("/generate")) == 1

    asyncio.run(run())


LONG = list(range(100, 100 + LONG_PROMPT))


@pytest.mark.parametrize(
    ("prompt", "once", "seeds", "together"),
    [(LONG, True, None, [1, 2]), (LONG, True, [0, 1, 2], [3]), (LONG, False, None, [3]), (LONG[1:], True, None, [3])],
)
def test_a_long_prompt_of_several_samples_is_prefilled_once(
    prompt: list[int], once: bool, seeds: list[int] | None, together: list[int]
):
    """The others follow when the first has begun, not when it has ended."""

    async def run() -> None:
        others = asyncio.Event()

        async def first_token_then_wait(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(event(0, output([3], reason=None)))
            await others.wait()
            await response.write(event(0, output([STOP])))
            return response

        async def generate(server: FakeServer, body: Body) -> Any:
            if len(body["input_ids"]) == 1:
                assert body["sampling_params"][0]["stream_interval"] > 0  # else SGLang does not tell of a first token
                return first_token_then_wait
            others.set()
            return [output([3, STOP]) for _ in body["input_ids"]]

        server = FakeServer(generate)
        async with serving(server) as urls, ServerPool(urls, "token", 300, prefill_once=once) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            for response in await pool.generate([prompt] * 3, SAMPLING, seeds):
                assert response.tokens.tolist() == [3, STOP]
        assert [len(body["input_ids"]) for body in server.bodies("/generate")] == together

    asyncio.run(run())


def test_what_a_server_said_before_it_broke_is_kept_with_its_versions():
    async def run() -> None:
        async def half(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(event(0, output([3, 4], reason=None)))
            await response.write(event(1, output([3, STOP])))
            assert request.transport
            request.transport.abort()
            return response

        async def generate(server: FakeServer, body: Body) -> Any:
            if len(server.bodies("/generate")) == 1:
                return half
            assert body["input_ids"] == [[1, 2, 3, 4]]
            assert [params["max_new_tokens"] for params in body["sampling_params"]] == [4]
            return [output([5, STOP], 1)]

        server = FakeServer(generate)
        async with serving(server) as urls, ServerPool(urls, "token", 300) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            asking = asyncio.create_task(pool.generate([[1, 2], [1, 2]], SAMPLING))
            while not pool.tokens_generated:
                await asyncio.sleep(0.001)
            async with pool.interrupt(1, Deadline(300)):
                server.version = "1"
            broken, ended = await asking
            assert content(broken) == ([3, 4, 5, STOP], [-3.0, -4.0, -5.0, -7.0], [0, 0, 1, 1], FinishReason.STOP)
            assert content(ended) == ([3, STOP], [-3.0, -7.0], [0, 0], FinishReason.STOP)
            assert pool.tokens_generated == pool.tokens["delivered"] == 6

    asyncio.run(run())


def test_each_sample_has_its_seed():
    async def generate(server: FakeServer, body: Body) -> Any:
        return [output([STOP], server.version) for _ in body["input_ids"]]

    async def run() -> None:
        server = FakeServer(generate)
        async with serving(server) as urls, ServerPool(urls, "token", 300) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            await pool.generate([[1], [2]], SAMPLING, seeds=[0, 5])
        (body,) = server.bodies("/generate")
        assert [params["sampling_seed"] for params in body["sampling_params"]] == [0, 5]

    asyncio.run(run())
    assert sample_seeds(1, 0, 4) == sample_seeds(1, 0, 4)
    assert len({seed for run in (1, 2) for group in (0, 1) for seed in sample_seeds(run, group, 4)}) == 16


def test_the_least_busy_server_is_asked_and_a_group_stays_together():
    everyone_is_here = asyncio.Event()
    sizes: dict[FakeServer, list[int]] = {}

    async def generate(server: FakeServer, body: Body) -> Any:
        sizes.setdefault(server, []).extend(body["input_ids"][0][:1] * len(body["input_ids"]))
        if sum(map(len, sizes.values())) == 6:
            everyone_is_here.set()
        await everyone_is_here.wait()
        return [output([STOP]) for _ in body["input_ids"]]

    async def run() -> None:
        servers = [FakeServer(generate), FakeServer(generate)]
        async with serving(*servers) as urls, ServerPool(urls, "token", 300) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            await asyncio.gather(*(pool.generate([[1]] * size, SAMPLING) for size in (3, 1, 1, 1)))
        assert [len(sizes[server]) for server in servers] == [3, 3]
        assert len(servers[0].bodies("/generate")) == 1  # what goes to a server together is one request

    asyncio.run(run())


def test_a_session_stays_on_its_server_until_that_leaves():
    async def generate(server: FakeServer, body: Body) -> Any:
        await asyncio.sleep(0.01)
        return [output([STOP]) for _ in body["input_ids"]]

    async def run() -> None:
        servers = [FakeServer(generate) for _ in range(3)]
        async with serving(*servers) as urls, ServerPool(urls, "token", 300) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass

            async def turns(session: int) -> None:
                for turn in range(4):
                    await pool.sample([session, turn], SAMPLING, session=session)

            await asyncio.gather(*map(turns, range(9)))
            homes = [{tokens[0] for body in s.bodies("/generate") for tokens in body["input_ids"]} for s in servers]
            assert sorted(map(len, homes)) == [3, 3, 3], "sessions are spread"
            assert len(set.union(*homes)) == 9, "and each has one server"
            pool.leave(pool.servers[0])
            await asyncio.gather(*map(turns, range(9)))
            later = [{tokens[0] for body in s.bodies("/generate") for tokens in body["input_ids"]} for s in servers]
            assert later[0] == homes[0]
            assert later[1] >= homes[1]
            assert later[2] >= homes[2]

    asyncio.run(run())


@pytest.mark.parametrize("turns", [1, 3], ids=["one turn", "turns at the same time"])
def test_a_session_leaves_a_server_that_answers_errors(turns: int):
    broken: list[FakeServer] = []

    async def generate(server: FakeServer, body: Body) -> Any:
        if server in broken:
            return web.Response(status=500, text="CUDA error: an illegal memory access was encountered")
        return [output([STOP]) for _ in body["input_ids"]]

    async def run() -> None:
        servers = [FakeServer(generate) for _ in range(2)]
        async with serving(*servers) as urls, ServerPool(urls, "token", 300) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            await pool.sample([20], SAMPLING, session=1)
            (home,) = (server for server in servers if server.bodies("/generate"))
            broken.append(home)
            await asyncio.gather(*(pool.sample([20, turn], SAMPLING, session=1) for turn in range(turns)))
            broken.clear()
            before = len(home.bodies("/generate"))
            await pool.sample([20, 9], SAMPLING, session=1)
            assert len(home.bodies("/generate")) == before, "its prefix is on the other one"

    asyncio.run(run())


def test_requests_stand_still_from_the_first_pause_until_they_go_on():
    """Through a weight update's second attempt, and through all of a trainer's turn."""

    async def run() -> None:
        async with serving(FakeServer()) as urls, ServerPool(urls, "token", 300) as pool:
            with suppress(ServerError):
                async with pool.interrupt(0, Deadline(300)):
                    await asyncio.sleep(0.2)
                    raise ServerError("lost")
            async with pool.interrupt(0, Deadline(300)):
                pass
            attempts = pool.statistics()["rollout/pause_seconds"]
            assert attempts >= 0.2

            await pool.hold(Deadline(300))
            await asyncio.sleep(1)
            async with pool.interrupt(0, Deadline(300)):
                pass
            assert pool.statistics()["rollout/pause_seconds"] == attempts, "they do not go on yet"
            await asyncio.sleep(0.1)
            await pool.release_hold(Deadline(300))
            assert (turn := pool.statistics()["rollout/pause_seconds"]) >= 1.1

            async with pool.interrupt(0, Deadline(300)):
                pass
            assert pool.statistics()["rollout/pause_seconds"] < turn

    asyncio.run(run())


def test_every_token_is_accounted_for_whatever_fails_or_is_cancelled():
    """generated = delivered + cancelled + failed + in flight; connections break all the while."""

    async def generate(server: FakeServer, body: Body) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for place, tokens in enumerate(body["input_ids"]):
                for part in [output([3, 4], reason=None), output([3, STOP])][: 1 if tokens[1] < 20 else 2]:
                    await asyncio.sleep(0.001)
                    if random.random() < 0.02:
                        assert request.transport
                        request.transport.abort()
                        return response
                    await response.write(event(place, part))
            await asyncio.sleep(600)  # those whose number is less than 20 never end
            return response

        return answer

    async def run() -> None:
        random.seed(0)
        servers = [FakeServer(generate) for _ in range(3)]
        async with serving(*servers) as urls, ServerPool(urls, "token", 300) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            sampling = replace(SAMPLING, max_new_tokens=10**6)
            asking = [asyncio.create_task(pool.sample([9, number], sampling)) for number in range(60)]
            ended = await asyncio.gather(*asking[20:])
            assert pool.tokens["delivered"] == sum(len(response.tokens) for response in ended)
            in_flight = pool.tokens_generated - pool.tokens.total()
            assert in_flight >= 2 * 15
            for task in asking[:20]:
                task.cancel()
            await asyncio.gather(*asking[:20], return_exceptions=True)
            assert pool.tokens["cancelled"] >= in_flight
            assert pool.tokens_generated == pool.tokens.total()
            assert not pool._router.busy
            while sum(len(server.bodies("/abort_request")) for server in servers) < 20:
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize("versions", [["3"], ["-1"], ["0", "1"]])
def test_tokens_of_another_weight_version_are_refused(versions: list[str]):
    async def generate(server: FakeServer, body: Body) -> Any:
        return [output([STOP] * len(versions), versions=versions)]

    with pytest.raises(ServerError, match=r"server 0 generated with weights of version .*; expected 0 to 0"):
        asyncio.run(ask(FakeServer(generate)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([output([3, STOP], versions=["0"])], "labelled 1 tokens of 2 with their weight version"),
        ([output([3, STOP], versions=["0"] * 3)], "labelled 3 tokens of 2"),
        ([output([STOP], versions=["new"])], "labelled tokens with new, which are not weight versions"),
        ([output([STOP], versions=[None])], "not weight versions"),
        ([], "server 0 ended its answer early"),
        ({"text": "hello"}, "server 0 ended its answer early"),
        ([{"text": "hello"}], "unusable answer: ValueError"),
        ([{"meta_info": None}], "unusable answer: ValueError"),
        (
            [output([STOP]) | {"meta_info": {"finish_reason": {"type": "stop"}, "output_columns": "AAAA"}}],
            "unusable",
        ),
    ],
)
def test_an_answer_that_cannot_be_used_is_asked_for_again_and_then_told(answer: Any, words: str):
    asked = 0

    async def generate(server: FakeServer, body: Body) -> Any:
        nonlocal asked
        asked += 1
        return answer if asked <= mistakes else [output([STOP])]

    mistakes = MOST_TRIES - 1
    assert len(asyncio.run(ask(FakeServer(generate)))) == 1
    asked, mistakes = 0, MOST_TRIES
    with pytest.raises(ServerError, match=f"(?s)failed {MOST_TRIES} times:.*{words}"):
        asyncio.run(ask(FakeServer(generate)))


def test_a_server_that_holds_another_version_after_an_update_is_told():
    async def run() -> None:
        good, late = FakeServer(), FakeServer()
        async with serving(good, late) as urls, ServerPool(urls, "token", 300) as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            async with pool.interrupt(1, Deadline(300)):
                good.version = "1"

    with pytest.raises(ServerError, match="server 1 holds weights 0 after an update to 1"):
        asyncio.run(run())


async def refuse(server: FakeServer, body: Body) -> Any:
    return web.Response(status=400, text="the prompt is too long")


async def too_long(server: FakeServer, body: Body) -> Any:
    return [output([], 0, "abort", status_code=400)]


async def give_up(server: FakeServer, body: Body) -> Any:
    return [output([3, 4], 0, "abort", status_code=503)]


async def fall_over(server: FakeServer, body: Body) -> Any:
    return web.Response(status=500, text="no idea")


async def hang(server: FakeServer, body: Body) -> Any:
    await asyncio.sleep(600)


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        (refuse, "server 0 at http://127.0.0.1:[0-9]+/generate answered 400: the prompt is too long"),
        (too_long, "server 0 aborted a request: no room"),
        (give_up, rf"failed {MOST_TRIES} times:(\n  server 0 aborted a request: no room){{{MOST_TRIES}}}"),
        (
            fall_over,
            f"(?s)failed {MOST_TRIES} times:.*server 0 at http://127.0.0.1:[0-9]+/generate answered 500: no idea",
        ),
        (hang, f"(?s)failed {MOST_TRIES} times:.*server 0 at http://127.0.0.1:[0-9]+ made no progress for 0.2 s"),
    ],
    ids=["refusal", "refused in an answer", "overload", "error", "silence"],
)
def test_a_server_that_does_not_answer_properly_is_named_with_its_words(generate: Any, words: str):
    with pytest.raises(ServerError, match=words):
        asyncio.run(ask(FakeServer(generate), timeout_s=0.2))


def test_a_server_that_keeps_its_requests_is_named():
    started = asyncio.Event()

    async def generate(server: FakeServer, body: Body) -> Any:
        started.set()
        await asyncio.sleep(600)

    async def run() -> None:
        server = FakeServer(generate)
        async with serving(server) as urls, ServerPool(urls, "token", 300, requests="drain") as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            asking = asyncio.create_task(pool.generate([[1]], SAMPLING))
            await started.wait()
            try:
                async with pool.interrupt(1, Deadline(0.5)):
                    pass
            finally:
                asking.cancel()

    told = r"server 0 made no progress for 0\.5 s .* weight_update.requests=drain .* within weight_update.timeout_s"
    with pytest.raises(ServerError, match=told):
        asyncio.run(run())


@pytest.mark.parametrize("signs", ["work", "tokens"])
def test_an_update_that_drains_waits_for_a_long_response_as_long_as_it_grows(signs: str):
    """Three times as long as an update may take, which then has all of its time."""
    seconds = 3.0

    async def generate(server: FakeServer, body: Body) -> Any:
        async def grow(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for number in range(30):
                await asyncio.sleep(seconds / 10)
                if signs == "work":
                    server.work_done += 1
                elif number % 5 == 0:
                    await response.write(event(0, output([3], server.version, reason=None)))
            await response.write(event(0, output([3, STOP], server.version)))
            return response

        return grow

    async def run() -> tuple[Any, bool]:
        server = FakeServer(generate)
        async with serving(server) as urls, ServerPool(urls, "token", 300, requests="drain") as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            asking = asyncio.create_task(pool.sample([1], Sampling(20, stop_token_ids=(STOP,))))
            while not server.bodies("/generate"):
                await asyncio.sleep(0.01)
            deadline = Deadline(seconds)
            async with pool.interrupt(1, deadline):
                in_time, server.version = not deadline.passed, "1"
            return await asking, in_time

    response, in_time = asyncio.run(asyncio.wait_for(run(), HUNG_S))
    assert response.tokens[-1] == STOP
    assert set(response.versions.tolist()) == {0}
    assert in_time


def test_a_dead_server_is_named():
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"

        async def run() -> None:
            async with ServerPool([url], "token", 5) as pool, pool.interrupt(0, Deadline(1)):
                pass

        with pytest.raises(ServerError, match=f"server 0 at {url}/pause_generation failed: "):
            asyncio.run(run())


# The rest asks SGLang itself.


@pytest.fixture(scope="module")
def models(sglang_server: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the server's shape with different opinions."""
    folder = tmp_path_factory.mktemp("models")
    return [real.peaked_model(sglang_server.model, folder / str(seed), seed) for seed in range(2)]


PROMPTS = [[5, 9, 11], [30, 4, 17, 22, 8], [12]]
EOS = (2,)  # of the arithmetic tokenizer


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_transformers_at_the_sampling_temperature(sglang_server, models, temperature):
    async def run() -> list[Response]:
        async with real.pool_on(sglang_server) as pool:
            await real.serve(pool, models[0], 0)
            return await pool.generate(PROMPTS * 3, Sampling(12, temperature, stop_token_ids=EOS))

    responses = asyncio.run(run())
    assert any(len(response.tokens) == 12 for response in responses)
    for prompt, response in zip(PROMPTS * 3, responses, strict=True):
        assert response.finish_reason == (FinishReason.STOP if response.tokens[-1] in EOS else FinishReason.LENGTH)
        expected = real.transformers_logprobs(models[0], prompt, response.tokens, temperature)
        other = real.transformers_logprobs(models[0], prompt, response.tokens, 1.7 - temperature)
        assert np.abs(expected - other).max() > 0.01  # a wrong temperature would show
        assert_close(response.logprobs, expected)


def test_a_request_without_the_runs_token_is_refused(sglang_server):
    async def run() -> None:
        async with ServerPool([sglang_server.url], "a stranger's", 10) as pool, pool.interrupt(0, Deadline(300)):
            pass

    with pytest.raises(ServerError, match="answered 401"):
        asyncio.run(run())


def test_a_servers_work_shows_while_it_generates_and_then_alone(sglang_server, models):
    prompts = [[5 + i % 20, 9] for i in range(256)]

    async def run() -> None:
        async with real.pool_on(sglang_server) as pool:
            await real.serve(pool, models[0], 0)
            (server,) = pool.servers
            assert await server.most_running(HUNG_S) >= 256
            asking = asyncio.create_task(pool.generate(prompts, Sampling(26)))
            seen = []
            while not asking.done():
                seen.append(str(await server.work_done(HUNG_S)))
                await asyncio.sleep(0.02)
            await asking
            assert len(set(seen)) > 2
            await asyncio.sleep(1)
            idle = [await server.work_done(HUNG_S) for _ in range(3) if await asyncio.sleep(0.2) is None]
            assert idle[0] == idle[1] == idle[2]

    asyncio.run(run())
