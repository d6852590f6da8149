"""Client processes read what servers answer: nothing is lost with one, and nothing is asked twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web
from fake_server import Body, FakeServer, InThisProcess, clients_of, event, output, serving
from limits import HUNG_S

from areal_like.cluster.lineage import identity, lives
from areal_like.cluster.workers import WorkerGroup
from areal_like.errors import ClusterError, WorkerError
from areal_like.experimental.client_processes import EVENTS, HANDED_OVER, Call, Clients, News
from areal_like.rollout import reading
from areal_like.rollout.pool import Sampling, ServerPool
from areal_like.rollout.sglang.answers import Part, Piece
from areal_like.rollout.sglang.http import Deadline
from areal_like.rollout.sglang.server import Server

pytestmark = pytest.mark.covers("client processes")

STOP = 7
SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=(STOP,))


class Mortal(InThisProcess):
    """A client process that dies, hangs, or cannot be asked, once it is told to."""

    dies = hangs = breaks = False

    async def call_one(self, rank: int, method: str, *args: Any, phase: str) -> Any:
        answer = await super().call_one(rank, method, *args, phase=phase)
        if self.hangs:
            await asyncio.sleep(600)
        if self.dies:
            raise WorkerError("client", 0, phase, "the process died", Path("client-0.log"))
        if self.breaks:
            raise RuntimeError("what nobody thought of")
        return answer


@pytest.mark.parametrize(
    ("how", "why"),
    [("dies", "the process died"), ("hangs", "no exchange within 0.5 s"), ("breaks", "what nobody thought of")],
)
@pytest.mark.parametrize("again", [True, False])
def test_what_a_lost_client_process_read_goes_on_from_where_it_was(how: str, why: str, again: bool):
    started: list[Mortal] = []
    told: list[str] = []

    async def start(rank: int) -> WorkerGroup:
        if started and not again:
            raise ClusterError("no room")
        started.append(Mortal())
        return cast(WorkerGroup, started[-1])

    async def generate(server: FakeServer, body: Body) -> Any:
        (given,) = body["input_ids"]
        if len(given) > 2:  # with what was kept of the first answer
            return [output([3, 4, STOP][len(given) - 2 :])]
        return begin

    async def begin(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event(0, output([3], reason=None)))
        await asyncio.sleep(600)
        return response

    async def run() -> None:
        server = FakeServer(generate)
        async with (
            serving(server) as urls,
            Clients(1, start, told.append, stall_s=1) as clients,
            ServerPool(urls, "token", 30, read_answer=clients.read) as pool,
        ):
            async with pool.interrupt(0, Deadline(300)):
                pass
            asking = asyncio.create_task(pool.sample([1, 2], SAMPLING))
            while not pool.tokens_generated:
                await asyncio.sleep(0.01)
            setattr(started[0], how, True)
            assert (await asking).tokens.tolist() == [3, 4, STOP]
            assert pool.tokens_generated == pool.tokens["delivered"] == 3
            assert len(server.bodies("/generate")) == 2
            assert pool.statistics()["server_faults/client"] == 1
            assert not pool._router._states[0].failures  # it was not the server's
            assert (await pool.sample([1, 2, 3], SAMPLING)).tokens.tolist() == [4, STOP]
        assert len(told) == 1
        assert ("was restarted" if again else "is not replaced: ") in told[0]
        assert why in told[0] and ("no room" in told[0]) != again
        for each in started:
            if each.client._session:
                await each.client._session.close()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_a_fault_of_a_client_process_is_not_its_server_s(monkeypatch: pytest.MonkeyPatch):
    faults = [KeyError("what nobody thought of")]

    def part_of(event: bytes, server: str) -> Part:
        if faults:
            raise faults.pop()
        return decoded(event, server)

    async def generate(server: FakeServer, body: Body) -> Any:
        return [output([3, STOP])]

    async def run() -> None:
        async with (
            serving(FakeServer(generate)) as urls,
            clients_of(1) as clients,
            ServerPool(urls, "token", 300, read_answer=clients.read) as pool,
        ):
            async with pool.interrupt(0, Deadline(300)):
                pass
            assert (await pool.sample([1, 2], SAMPLING)).tokens.tolist() == [3, STOP]
            faulty = {name: n for name, n in pool.statistics().items() if name.startswith("server_faults/") and n}
            assert faulty == {"server_faults/client": 1}

    decoded = reading.part_of
    monkeypatch.setattr(reading, "part_of", part_of)
    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_what_is_cancelled_at_once_is_aborted_after_the_server_had_it():
    async def generate(server: FakeServer, body: Body) -> Any:
        await asyncio.sleep(600)

    async def run() -> None:
        server = FakeServer(generate)
        async with (
            serving(server) as urls,
            clients_of(1) as clients,
            ServerPool(urls, "token", 300, read_answer=clients.read) as pool,
        ):
            async with pool.interrupt(0, Deadline(300)):
                pass
            asking = [asyncio.create_task(pool.sample([number], SAMPLING)) for number in range(3)]
            while not clients._links[0].news:  # the request is on its way to the client process
                await asyncio.sleep(0)
            for task in asking[1:]:
                task.cancel()
            while len(server.bodies("/abort_request")) < 2:
                await asyncio.sleep(0.01)
            (asked,) = server.bodies("/generate")
            assert {body["rid"] for body in server.bodies("/abort_request")} == set(asked["rid"][1:])
            paths = [path for path, _ in server.requests]
            assert paths.index("/generate") < paths.index("/abort_request")
            assert pool._router.busy
            asking[0].cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_what_has_come_of_many_samples_is_taken_in_pieces_between_which_the_event_loop_turns():
    calls, samples = 3, 10 * EVENTS * HANDED_OVER

    class Full(InThisProcess):
        """A client process that has everything at the first exchange."""

        async def call_one(self, rank: int, method: str, *args: Any, phase: str) -> Any:
            new: list[Call] = args[0]
            await asyncio.sleep(0)
            pieces: list[Part] = [(place, Piece(np.full((3, 1), place, np.int32), None)) for place in range(samples)]
            return News.pack({call: [*pieces, None] for call, *_ in new})

    async def start(rank: int) -> WorkerGroup:
        return cast(WorkerGroup, Full())

    async def run() -> None:
        taken: list[list[int]] = [[] for _ in range(calls)]

        async def take(call: int) -> None:
            async for parts in clients.read(Server("server 0", "", cast(Any, None)), b""):
                taken[call] += [piece.columns.item(0, 0) for _, piece in parts if isinstance(piece, Piece)]

        async with Clients(1, start, print, stall_s=HUNG_S) as clients:
            taking = asyncio.gather(*map(take, range(calls)))
            counts = [0]
            while not taking.done():
                await asyncio.sleep(0)
                counts.append(sum(map(len, taken)))
        assert taken == [list(range(samples))] * calls
        assert max(np.diff(counts)) <= EVENTS * HANDED_OVER

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_the_death_of_an_actor_costs_no_token(tmp_path: Path):
    """With Ray: one of two client processes is killed in the middle of its answers, with the controller at the end."""
    here = Path(__file__).parent
    job = subprocess.Popen(
        [sys.executable, here / "killed_client.py", tmp_path],
        env={**os.environ, "PYTHONPATH": f"{here.parents[1]}:{here.parent}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout
    facts = json.loads(job.stdout.readline())
    assert facts["lengths"] == [1024] * 64
    assert facts["generated"] == facts["delivered"] == 64 * 1024
    assert facts["faults"] > 0
    assert facts["torch"] == []
    assert len(facts["before"]) == len(facts["after"]) == 2 != len({*facts["before"], *facts["after"]})
    after = [identity(pid) for pid in facts["after"]]
    job.send_signal(signal.SIGKILL)
    job.wait()
    limit = time.monotonic() + HUNG_S
    while any(map(lives, after)):  # a zombie has ended: its parent may be a process that waits for none
        assert time.monotonic() < limit, "a client process outlived its controller"
        time.sleep(0.1)
