"""Servers that die or hang are started again, as often as is allowed, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import Body, FakeServer, output, serving
from limits import HUNG_S

from areal_like.backends import http
from areal_like.backends.sglang import GIVE_UP
from areal_like.backends.sglang.server import RECEIVE
from areal_like.backends.transports.collective.controller import CollectiveSync
from areal_like.backends.transports.disk.controller import DiskSync
from areal_like.core.errors import WeightUpdateError, WorkerError
from areal_like.core.rollout import router
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.weights import SyncSpec, TensorSpec, publish
from areal_like.run import supervisor
from areal_like.run.supervisor import Restarts, ServerSupervisor

pytestmark = pytest.mark.covers("server restart")

STOP = 7
SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=(STOP,))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "PAUSE_S", 0.02)
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.02)
    monkeypatch.setattr(http, "AFTERMATH_S", 0.05)


class Actors:
    """The Ray actors of fake servers: `die(rank)` ends a server, `lose(rank)` its actor too.

    `spare` are the URLs of the servers that are started again, in these actors or in those that replace them.
    """

    role = "rollout"

    def __init__(self, *spare: str | None) -> None:
        self.deaths: dict[int, asyncio.Event] = {}
        self.ended: list[int] = []
        self.killed: list[int] = []
        self.replaced: list[int] = []
        self.starts = 0
        self.members = [SimpleNamespace(host="10.0.0.7", rank=0, log_file=Path("log"))]
        self._lost: set[int] = set()
        self._spare = list(spare)

    def die(self, rank: int) -> None:
        self.deaths.setdefault(rank, asyncio.Event()).set()

    def lose(self, rank: int) -> None:
        self._lost.add(rank)
        self.die(rank)

    def only(self, rank: int) -> One:
        return One(self, rank)

    def kill(self) -> None:
        self.killed.append(0)

    @asynccontextmanager
    async def replace(self, rank: int) -> AsyncIterator[One]:
        self.replaced.append(rank)
        self._lost.discard(rank)
        yield One(self, rank)

    async def call_one(self, rank: int, method: str, *, phase: str, timeout: float | None = None) -> Any:
        if method == "watch":
            await self.deaths.setdefault(rank, asyncio.Event()).wait()
            self.deaths[rank] = asyncio.Event()
            if rank in self._lost:
                raise WorkerError("rollout", rank, phase, "the process died (worker exited)", Path("log"))
            raise WorkerError("rollout", rank, phase, f"server-{rank} ended with exit code -9", Path("log"), "trace")
        if method == "end":
            self.ended.append(rank)
            self.die(rank)
            return None
        self.starts += 1
        if (url := self._spare.pop(0)) is None:
            raise WorkerError("rollout", rank, phase, "server-0 ended before it was ready", Path("log"), "trace")
        return url


@dataclass
class One:
    """A group of one of the actors."""

    actors: Actors
    rank: int
    role = "rollout"

    @property
    def members(self) -> list[Any]:
        return self.actors.members

    async def call_one(self, rank: int, method: str, *, phase: str, timeout: float | None = None) -> Any:
        return await self.actors.call_one(self.rank, method, phase=phase, timeout=timeout)

    def kill(self) -> None:
        self.actors.killed.append(self.rank)


class Stuck(Actors):
    """An actor that cannot end its server."""

    async def call_one(self, rank: int, method: str, *, phase: str, timeout: float | None = None) -> Any:
        if method == "end":
            raise WorkerError("rollout", rank, phase, "no answer from rank 0 within 610 s", Path("log"))
        return await super().call_one(rank, method, phase=phase, timeout=timeout)


def supervised(
    actors: Actors, pool: ServerPool, restarts: int, least: int, say: Callable[[str], None]
) -> ServerSupervisor:
    return ServerSupervisor(actors, pool, restarts, least, say, actors.replace)  # type: ignore[arg-type]


async def generate(server: FakeServer, body: Body) -> Any:
    await asyncio.sleep(0.005)
    return [output([3, STOP], server.version) for _ in body["input_ids"]]


async def silence(server: FakeServer, body: Body) -> Any:
    await asyncio.sleep(600)


async def opened(pool: ServerPool, version: int, *servers: FakeServer) -> None:
    async with pool.interrupt(version, Deadline(5)):
        for server in servers:
            server.version = str(version)


def test_a_server_that_dies_is_started_again_and_joins_with_the_next_weights():
    async def run() -> None:
        dying, other, again, said = FakeServer(silence), FakeServer(generate), FakeServer(generate), []
        async with serving(dying, other, again) as urls, ServerPool(urls[:2], "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors(None, urls[2])
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, said.append).keep())
            asking = [asyncio.create_task(pool.sample([9, n], SAMPLING)) for n in range(20)]
            while not dying.bodies("/generate"):
                await asyncio.sleep(0.01)
            actors.die(0)
            for response in await asyncio.gather(*asking):
                assert response.tokens.tolist() == [3, STOP]
            while len(pool.servers) < 2:
                await asyncio.sleep(0.01)
            assert [server.url for server in pool.serving] == [other.url]
            assert again.requests == []
            await opened(pool, 1, other, again)
            assert [server.url for server in pool.serving] == [other.url, again.url]
            await asyncio.gather(*(pool.sample([9, n], SAMPLING) for n in range(20)))
            assert again.bodies("/generate")
            assert actors.starts == 2
            assert said[0] == "server-0 ended with exit code -9. 1 server continues. The failed server is restarted."
            assert said[-1] == "Server 0 restarted as server 2. It rejoins at the next weight update."
            assert not watching.done()
            watching.cancel()

    asyncio.run(run())


def test_a_server_that_hangs_is_ended_and_started_again():
    async def run() -> None:
        hanging, other, again, said = FakeServer(silence), FakeServer(generate), FakeServer(generate), []
        async with serving(hanging, other, again) as urls, ServerPool(urls[:2], "token", 0.3) as pool:
            await opened(pool, 0)
            actors = Actors(urls[2])
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, said.append).keep())
            responses = await asyncio.gather(*(pool.sample([9, n], SAMPLING) for n in range(20)))
            assert len(responses) == 20
            while actors.starts < 1:
                await asyncio.sleep(0.01)
            assert actors.ended == [0]
            assert said[0].startswith("server 0 made no progress on requests (rollout.request_timeout_s)")
            watching.cancel()

    asyncio.run(run())


def test_a_server_that_is_said_to_hang_once_more_is_not_ended_again():
    """Who said it asked before the server was ended, and heard nothing until another one was started in its place."""

    async def run() -> None:
        hanging, other, again = FakeServer(generate), FakeServer(generate), FakeServer(generate)
        async with serving(hanging, other, again) as urls, ServerPool(urls[:2], "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors, (first, _) = Actors(urls[2]), pool.servers
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, print).keep())
            await asyncio.sleep(0.02)
            pool._router.hung(first)
            await until(lambda: actors.starts == 1)
            pool._router.hung(first)
            await asyncio.sleep(0.05)
            assert (actors.ended, len(pool.servers)) == ([0], 2)
            watching.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("version", [-1, 0], ids=["before the first version", "later"])
def test_a_run_ends_when_too_few_servers_are_left(restarts: int, version: int):
    async def run() -> None:
        async with (
            serving(FakeServer(generate), FakeServer(generate)) as urls,
            ServerPool(urls, "token", HUNG_S) as pool,
        ):
            if version == 0:
                await opened(pool, 0)
            actors = Actors()
            actors.die(1)
            await supervised(actors, pool, restarts, 2, print).keep()

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(asyncio.wait_for(run(), HUNG_S))
    assert "rollout rank 1 failed during serving: server-1 ended with exit code -9" in str(raised.value.exceptions[0])


def test_without_restarts_the_pool_shrinks_and_the_run_goes_on():
    async def run() -> None:
        dying, other, said = FakeServer(generate), FakeServer(generate), []
        async with serving(dying, other) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors()
            watching = asyncio.create_task(supervised(actors, pool, 0, 1, said.append).keep())
            actors.die(0)
            await until(lambda: len(pool.servers) == 1)
            await asyncio.sleep(0.1)
            assert (await pool.sample([9], SAMPLING)).tokens.tolist() == [3, STOP]
            assert (actors.starts, actors.replaced, watching.done()) == (0, [], False)
            assert said == [
                "server-0 ended with exit code -9. 1 server continues. "
                "The failed server is not restarted (rollout.max_restarts=0)."
            ]
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_a_server_whose_actor_is_lost_is_restarted_in_another_one():
    """As after SIGKILL of the actor, or on a host that Ray has lost; where one replacement cannot, the next does."""

    async def run() -> None:
        lost, other, again, said = FakeServer(silence), FakeServer(generate), FakeServer(generate), []
        async with serving(lost, other, again) as urls, ServerPool(urls[:2], "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors(None, urls[2])
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, said.append).keep())
            asking = [asyncio.create_task(pool.sample([9, n], SAMPLING)) for n in range(20)]
            await until(lambda: bool(lost.bodies("/generate")))
            actors.lose(0)
            for response in await asyncio.gather(*asking):
                assert response.tokens.tolist() == [3, STOP]
            await until(lambda: len(pool.servers) == 2)
            assert (actors.replaced, actors.killed) == ([0, 0], [0, 0])
            assert said[0] == "the process died (worker exited). 1 server continues. The failed server is restarted."
            await opened(pool, 1, other, again)
            assert [server.url for server in pool.serving] == [other.url, again.url]
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_actors_that_do_not_start_are_no_restarts_of_the_server():
    """As while Ray has not noticed yet that a node is lost."""

    async def run() -> None:
        lost, other, again, said = FakeServer(generate), FakeServer(generate), FakeServer(generate), []
        async with serving(lost, other, again) as urls, ServerPool(urls[:2], "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors(urls[2])

            @asynccontextmanager
            async def replace(rank: int) -> AsyncIterator[One]:
                if len(said) < 4:
                    raise WorkerError("rollout", rank, "start-up", "the process died (node)", Path("log"))
                yield One(actors, rank)

            watcher = ServerSupervisor(actors, pool, 1, 1, said.append, replace)  # type: ignore[arg-type]
            watching = asyncio.create_task(watcher.keep())
            actors.lose(0)
            await until(lambda: len(said) == 5)
            assert said[4].startswith("Server 0 restarted as server 2")
            assert said[1:4] == ["the process died (node). 1 server continues. The failed server is restarted."] * 3
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_a_server_that_hangs_with_its_actor_is_restarted_in_another_one():
    """As on a host that is silent, before Ray has noticed."""

    async def run() -> None:
        hanging, other, again, said = FakeServer(silence), FakeServer(generate), FakeServer(generate), []
        async with serving(hanging, other, again) as urls, ServerPool(urls[:2], "token", 0.3) as pool:
            await opened(pool, 0)
            actors = Stuck(urls[2])
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, said.append).keep())
            await asyncio.gather(*(pool.sample([9, n], SAMPLING) for n in range(20)))
            await until(lambda: len(pool.servers) == 2)
            assert (actors.replaced, actors.killed) == ([0], [0])
            assert any("server 0 hangs and could not be killed: no answer from rank 0" in line for line in said)
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_a_death_before_the_first_version_does_not_end_the_run(tmp_path: Path):
    async def run() -> None:
        dying, other, again, said = FakeServer(generate), FakeServer(generate), FakeServer(generate), []
        async with serving(dying, other, again) as urls, ServerPool(urls[:2], "token", HUNG_S) as pool:
            actors = Actors(urls[2])
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, said.append).keep())
            actors.lose(0)
            await until(lambda: [server.url for server in pool.servers] == [other.url, again.url])
            await publish(DiskSync(Disk(), pool, SyncSpec(20, tmp_path, 1, "gloo", 1)), 0, 20)
            assert len(pool.serving) == 2
            assert not watching.done()
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


def test_restarts_are_counted_per_server_and_hour():
    """Four deaths in weeks are none too many; the third within an hour waits for the hour to end."""
    now = 0.0
    restarts, never = Restarts(2, lambda: now), Restarts(0)

    async def run() -> None:
        nonlocal now
        for _ in range(10):
            now += 1801.0
            assert restarts.wait_s == 0
            await restarts.permit()
        assert (
            str(restarts)
            == "The failed server is restarted in 30 min: rollout.max_restarts allows 2 restarts per hour."
        )
        assert restarts.wait_s == 3600 - 1801
        now += 1799
        assert (str(restarts), restarts.wait_s) == ("The failed server is restarted.", 0)

    asyncio.run(run())
    assert str(never) == "The failed server is not restarted (rollout.max_restarts=0)."


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.01)


UPDATE = "/update_weights_from_disk"


async def hang() -> Any:
    await asyncio.sleep(600)


class Disk:
    """A trainer that has written its weights."""

    async def save_hf(self, path: Path, *, phase: str, timeout_s: float) -> None:
        path.mkdir()


class Full:
    """A trainer whose disk has no room."""

    async def save_hf(self, path: Path, *, phase: str, timeout_s: float) -> None:
        path.mkdir()
        cause = "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)"
        raise WorkerError("actor", 0, phase, cause, Path("log"), "trace")


def test_a_full_disk_is_told_with_what_helps(tmp_path: Path):
    async def run() -> None:
        async with serving(FakeServer(generate)) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            await publish(DiskSync(Full(), pool, SyncSpec(20, tmp_path, 1, "gloo", 1)), 1, 20)

    with pytest.raises(WeightUpdateError, match=r"weights of version 1 do not fit .* write weight_update\.mode=coll"):
        asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "silent", [(), ("/pause_generation",), (UPDATE,)], ids=["dies", "hangs", "has a scheduler that hangs"]
)
def test_an_update_goes_on_without_a_server_that(silent: tuple[str, ...], tmp_path: Path):
    """SGLang answers a pause without its scheduler."""

    async def run() -> None:
        dying, other = FakeServer(generate), FakeServer(generate)
        async with serving(dying, other) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors()
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, print).keep())

            async def die() -> Any:
                actors.die(0)
                await asyncio.sleep(0.1)
                raise ConnectionResetError

            dying.answers |= dict.fromkeys((*silent, "/server_info"), hang) if silent else {UPDATE: die}
            await publish(DiskSync(Disk(), pool, SyncSpec(3, tmp_path, 1, "gloo", 1)), 1, 3)
            assert actors.ended == ([0] if silent else [])
            assert pool.version == 1
            assert [server.url for server in pool.serving] == [other.url]
            assert other.version == "1"
            response = await pool.sample([9], SAMPLING)
            assert response.versions.tolist() == [1, 1]
            watching.cancel()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_drain_goes_on_without_a_server_that_hangs(tmp_path: Path):
    async def run() -> None:
        hanging, other = FakeServer(silence), FakeServer(generate)
        async with serving(hanging, other) as urls, ServerPool(urls, "token", HUNG_S, requests="drain") as pool:
            await opened(pool, 0)
            actors = Actors(None, None, None)
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, print).keep())
            hanging.answers["/server_info"] = hang
            asking = [asyncio.create_task(pool.sample([9, n], SAMPLING)) for n in range(4)]
            await until(lambda: bool(hanging.bodies("/generate")))
            await publish(DiskSync(Disk(), pool, SyncSpec(1, tmp_path, 1, "gloo", 1)), 1, 1)
            assert actors.ended == [0]
            responses = await asyncio.gather(*asking)
            assert {version for response in responses for version in response.versions.tolist()} == {0, 1}
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


class Broadcasting:
    """A trainer whose broadcasts end when those of all servers do."""

    async def transfer(self, step: str, *args: Any, timeout_s: float | None = None) -> Any:
        if step == "open":
            return "127.0.0.1", 1
        return [[TensorSpec("w", "float32", (2,), 8)]] if step == "layout" else None


def test_a_broadcast_goes_on_without_the_server_that_hangs_in_it_whichever_is_late_first():
    """All servers are late then, and the error may name one that only waits: here server 1."""

    async def run() -> None:
        hanging, other, said = FakeServer(generate), FakeServer(generate), []
        async with serving(hanging, other) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors(None, None, None)
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, said.append).keep())

            async def stop() -> Any:
                hanging.answers |= dict.fromkeys((RECEIVE, "/server_info", "/destroy_weights_update_group"), hang)
                await asyncio.sleep(600)

            async def wait_for_it() -> Any:
                if not other.bodies(GIVE_UP):
                    await asyncio.sleep(600)
                other.version = "1"
                return {"success": True, "message": "done"}

            other.answers[RECEIVE], hanging.answers[RECEIVE] = wait_for_it, stop
            sync = CollectiveSync(Broadcasting(), pool, SyncSpec(3, Path(), 1, "gloo", 1))  # type: ignore[arg-type]
            await sync.connect()
            await publish(sync, 1, 3)
            assert actors.ended == [0]
            assert [server.url for server in pool.serving] == [other.url]
            assert pool.version == 1
            watching.cancel()

    asyncio.run(run())


async def refuse() -> Any:
    return {"success": False, "message": "no such directory"}


@pytest.mark.parametrize("path", [UPDATE, "/pause_generation", "/continue_generation", "/model_info"])
def test_a_server_that_is_lost_without_a_word_is_not_waited_for(path: str, tmp_path: Path):
    """Its host is silent, so that no connection breaks, and only Ray says that it is lost."""

    async def run() -> None:
        lost, other = FakeServer(generate), FakeServer(generate)
        async with serving(lost, other) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            await opened(pool, 0)
            actors = Actors(None, None, None)
            watching = asyncio.create_task(supervised(actors, pool, 3, 1, print).keep())

            async def lose() -> Any:
                actors.die(0)
                await asyncio.sleep(600)

            lost.answers[path] = lose
            update = publish(DiskSync(Disk(), pool, SyncSpec(300, tmp_path, 1, "gloo", 1)), 1, 300)
            await asyncio.wait_for(update, HUNG_S)
            assert [server.url for server in pool.serving] == [other.url]
            assert (other.version, actors.ended) == ("1", [])
            watching.cancel()

    asyncio.run(run())


def test_a_server_that_loads_for_too_long_is_not_said_to_hang(tmp_path: Path):
    """Another limit would help it, a restart would not."""

    async def run() -> None:
        slow = FakeServer(generate)
        slow.answers[UPDATE] = hang
        async with serving(slow, FakeServer(generate)) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            hung: list[Any] = []
            pool.on_hang(hung.append)
            with pytest.raises(WeightUpdateError, match=f"{UPDATE} did not answer within"):
                await publish(DiskSync(Disk(), pool, SyncSpec(2, tmp_path, 1, "gloo", 1)), 1, 2)
            assert hung == []

    asyncio.run(run())


def test_no_server_is_said_to_hang_that_had_no_time(tmp_path: Path):
    class Slow(Disk):
        """A trainer that takes all of the time."""

        async def save_hf(self, path: Path, *, phase: str, timeout_s: float) -> None:
            await asyncio.sleep(timeout_s)

    async def run() -> None:
        server = FakeServer(generate)
        server.answers["/pause_generation"] = hang
        async with serving(server) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            hung: list[Any] = []
            pool.on_hang(hung.append)
            with pytest.raises(WeightUpdateError, match="version 1"):
                await publish(DiskSync(Slow(), pool, SyncSpec(0.1, tmp_path, 1, "gloo", 1)), 1, 0.1)
            assert hung == []

    asyncio.run(run())
