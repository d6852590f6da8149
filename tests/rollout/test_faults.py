"""Each way in which a server fails has a name, is counted, and costs no response: nothing is lost and nothing twice."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web
from fake_server import Body, FakeServer, event, output, serving
from limits import HUNG_S

from areal_like.backends import http
from areal_like.backends.sglang.labels import LABELS
from areal_like.backends.sglang.patches.columns import with_columns
from areal_like.core.errors import ServerError
from areal_like.core.rollout import router
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Sampling, ServerPool

STOP = 7
SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=(STOP,))
GOOD = [output([3, 4, STOP])]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "PAUSE_S", 0.02)
    monkeypatch.setattr(http, "AFTERMATH_S", 0.02)


def streamed(*parts: bytes, breaks: bool = False) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if breaks:
            await asyncio.sleep(0.05)  # so that what was written is read
            assert request.transport
            request.transport.abort()
        return response

    return answer


def response(**options: Any) -> Any:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(**options)

    return answer


BEGUN = event(0, output([3], reason=None))
LONG = output(list(range(20, 40)))


def info(**changes: Any) -> dict[str, Any]:
    """The usual answer with other `meta_info`."""
    return {"meta_info": GOOD[0]["meta_info"] | changes}


def rows(logprobs: list[Any]) -> dict[str, Any]:
    """An answer as SGLang itself would write it."""
    finish = {"type": "stop"}
    return {"meta_info": {"output_token_logprobs": logprobs, LABELS: ["0"] * len(logprobs), "finish_reason": finish}}


FAULTS = {
    "garbage": (["hello"], "unusable"),
    "an error page": (response(text="<html>"), "half_answer"),
    "no JSON": (streamed(b"data: <html>\n\n"), "unusable"),
    "JSON of something else": ([{"text": "hello"}], "unusable"),
    "another's answer": (streamed(event(5, output([3, STOP]))), "unusable"),
    "null for a log-prob": ([with_columns(rows([[None, 3, None]] * 3))], "unusable"),
    "an infinite log-prob": ([with_columns(rows([[-math.inf, 3, None]] * 3))], "unusable"),
    "columns of half a token": ([info(output_columns="AAAAAA==")], "unusable"),
    "columns that are no base64": ([info(output_columns="???")], "unusable"),
    "columns that are a number": ([info(output_columns=3)], "unusable"),
    "lists of tokens": ([rows([[-1.0, 3, None]] * 3)], "unusable"),
    "an unknown end": ([info(finish_reason={"type": "tired"})], "unusable"),
    "more than was asked for": ([LONG], "unusable"),
    "an empty answer": (streamed(), "half_answer"),
    "half an answer": (streamed(BEGUN), "half_answer"),
    "half an event": (streamed(BEGUN, event(0, output([4, STOP]))[:30]), "half_answer"),
    "a broken connection": (streamed(BEGUN, breaks=True), "connection"),
    "fewer labels": ([output([3, 4, STOP], versions=["0"])], "wrong_labels"),
    "more labels": ([output([3, 4, STOP], versions=["0"] * 4)], "wrong_labels"),
    "labels that go down": ([output([3, 4, STOP], versions=["0", "1", "0"])], "wrong_labels"),
    "labels that are words": ([output([3, 4, STOP], versions=["new"] * 3)], "wrong_labels"),
    "an error of its own": (response(status=500), "server_error"),
    "too much to do": (response(status=429), "server_error"),
    "a request given up": ([output([], reason="abort", status_code=503)], "server_error"),
    "a request given up in few words": (
        [{"meta_info": {"finish_reason": {"type": "abort", "status_code": 503}}}],
        "server_error",
    ),
    "no log-probs": ([{"meta_info": {"finish_reason": {"type": "stop"}}}], "unusable"),
    "an error in an event": ([{"error": {"code": 500, "message": "no"}}], "server_error"),
    "nothing": (None, "stalled"),
}


@pytest.mark.parametrize(("answer", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_counted_by_its_name_and_its_request_asked_again(answer: Any, fault: str):
    async def generate(server: FakeServer, body: Body) -> Any:
        if len(server.bodies("/generate")) == 1:
            return answer if answer is not None else await asyncio.sleep(600)
        (given,) = body["input_ids"]  # with what was kept of the first answer
        return [output([3, 4, STOP][len(given) - 2 :])]

    async def run() -> None:
        async with (
            serving(FakeServer(generate)) as urls,
            ServerPool(urls, "token", 0.3) as pool,
        ):
            async with pool.interrupt(0, Deadline(300)):
                pass
            response = await pool.sample([1, 2], SAMPLING)
            assert response.tokens.tolist() == [3, 4, STOP]
            assert response.logprobs.tolist() == [-3.0, -4.0, -7.0]
            assert pool.tokens_generated == pool.tokens["delivered"] == 3
            numbers = pool.statistics()
            assert {name: times for name, times in numbers.items() if "fault" in name} == {f"server_faults/{fault}": 1}
            assert numbers["rollout/queue_seconds_max"] >= numbers["rollout/queue_seconds_mean"] >= 0
            assert not any("fault" in name for name in pool.statistics())

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


ENDS = {
    "an old version": ([output([STOP], version=0)], "wrong_version"),
    "a refusal": (web.Response(status=400, text="too long"), "refused"),
    "a refusal in an event": ([{"error": {"code": 422, "message": "too long"}}], "refused"),
}


@pytest.mark.parametrize(("answer", "fault"), ENDS.values(), ids=ENDS)
def test_what_another_try_cannot_mend_ends_the_request_with_its_name(answer: Any, fault: str):
    async def generate(server: FakeServer, body: Body) -> Any:
        return answer

    async def run() -> None:
        server = FakeServer(generate)
        async with serving(server) as urls, ServerPool(urls, "token", 30) as pool:
            for version in range(2):
                async with pool.interrupt(version, Deadline(300)):
                    server.version = str(version)
            with pytest.raises(ServerError) as raised:
                await pool.sample([1, 2], SAMPLING)
            assert raised.value.fault == fault
            assert pool.statistics()[f"server_faults/{fault}"] == 1
            assert len(server.bodies("/generate")) == 1

    asyncio.run(asyncio.wait_for(run(), HUNG_S))
