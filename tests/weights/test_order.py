"""What the trainer does before the servers pause, what it holds meanwhile, and who is named when someone is late."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import FakeServer, output, serving
from limits import HUNG_S
from torch import Tensor

from areal_like.backends.transports.collective import rank as collective
from areal_like.backends.transports.collective.rank import CollectiveSender
from areal_like.backends.transports.ipc.rank import IpcSender
from areal_like.core import weights as sync
from areal_like.core.errors import WeightUpdateError, WorkerError
from areal_like.core.rollout.pool import Requests, Sampling, ServerPool
from areal_like.core.transfer import EXPORT_LAYOUT
from areal_like.core.weights import SyncSpec, make_sync, publish

MIB = 1 << 20


class Engine:
    """Five tensors of 0.6 MiB; counts those that somebody still holds when the next one is made."""

    def __init__(self) -> None:
        self.most_held = 0

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        made: list[weakref.ref[Tensor]] = []
        for number in range(5):
            self.most_held = max(self.most_held, sum(other() is not None for other in made))
            tensor = torch.full((MIB // 5 * 3 // 4,), float(number))
            made.append(weakref.ref(tensor))
            pair = (f"weight {number}", tensor)
            del tensor
            yield pair
            del pair


class FakeTrainer:
    """Exports for real, joins and sends nothing; `hangs_in` is the step, and for `prepare` its bucket, that hangs."""

    def __init__(self, hangs_in: tuple[Any, ...] = ()) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self._hangs_in = hangs_in
        self._sender = CollectiveSender(Engine(), 0, "127.0.0.1")

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        self.steps.append((step, arguments[0]) if step == "prepare" else (step,))
        if self.steps[-1] == self._hangs_in:
            await asyncio.sleep(timeout_s)
            raise WorkerError("actor", 0, f"weight update ({step})", "no answer from rank 0", Path("actor-0.log"))
        if step in ("open", "layout", "prepare"):
            return getattr(self._sender, step)(*arguments)
        if step == "send":
            self._sender.ready.clear()
        return None

    async def save_hf(self, *_: Any, **__: Any) -> None:
        self.steps.append(("save",))


async def update(trainer: FakeTrainer, server: FakeServer, timeout_s: float = 20, prefetch_mb: int = 0) -> None:
    async with serving(server) as urls, ServerPool(urls, "token", HUNG_S) as pool:
        spec = SyncSpec(timeout_s, Path(), 1, "gloo", bucket_mb=1, prefetch_mb=prefetch_mb)
        bound = make_sync("collective", trainer, pool, spec)
        await bound.connect()
        await publish(bound, 0, timeout_s)
        if server.busy.is_set():
            return
        asking = asyncio.create_task(pool.generate([[1]], Sampling(4, stop_token_ids=(7,))))
        await server.busy.wait()
        try:
            await publish(bound, 1, timeout_s)
        finally:
            asking.cancel()


def busy_server() -> FakeServer:
    async def generate(server: FakeServer, body: Any) -> Any:
        server.busy.set()
        await asyncio.sleep(600)

    server = FakeServer(generate)
    server.busy = asyncio.Event()
    return server


@pytest.mark.parametrize(("prefetch_mb", "ahead"), [(0, 1), (1, 1), (2, 3), (99, 5)])
def test_the_first_buckets_are_gathered_while_the_servers_generate(prefetch_mb: int, ahead: int):
    """Five buckets of 0.6 MiB: as many as there is room for, and at least one."""
    trainer, server, steps = FakeTrainer(), busy_server(), []
    transfer = trainer.transfer

    async def watched(step: str, *arguments: Any, timeout_s: float) -> Any:
        if server.busy.is_set():
            steps.append((step, *arguments, len(server.bodies("/pause_generation")) == 2))
        return await transfer(step, *arguments, timeout_s=timeout_s)

    trainer.transfer = watched
    asyncio.run(update(trainer, server, prefetch_mb=prefetch_mb))
    assert len(trainer._sender._buckets) == 5
    assert steps == [
        ("prepare", 0, ahead, False),
        ("send", True),
        *(step for number in range(ahead, 5) for step in (("prepare", number, True), ("send", True))),
    ]


class Lender:
    """A trainer that lends five tensors of 0.6 MiB."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._sender = IpcSender(Engine(), 0, "127.0.0.1")

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        self.steps.append(step)
        return getattr(self._sender, step)(*arguments)

    async def transfers(self, step: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return [await self.transfer(step, *arguments, timeout_s=timeout_s), None]


@pytest.mark.parametrize(("prefetch_mb", "lent"), [(0, [1] * 5), (2, [3, 2]), (99, [5])])
def test_as_much_is_lent_at_once_as_may_be_held(prefetch_mb: int, lent: list[int], tmp_path: Path):
    trainer, server, before_pause = Lender(), FakeServer(), list[str]()

    async def pause() -> Any:
        before_pause.extend(trainer.steps)
        return {}

    async def run() -> None:
        async with serving(server) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            bound = make_sync(
                "ipc", trainer, pool, SyncSpec(20, tmp_path, 1, "gloo", bucket_mb=1, prefetch_mb=prefetch_mb)
            )
            await bound.connect()
            await publish(bound, 0, 20)

    server.answers["/pause_generation"] = pause
    asyncio.run(run())
    bodies = server.bodies("/update_weights_from_ipc")
    layouts = [json.loads(body["zmq_handles"][EXPORT_LAYOUT]) for body in bodies]
    assert [len(layout) for layout in layouts] == lent
    assert [name for layout in layouts for name, _, _ in layout] == [f"weight {number}" for number in range(5)]
    assert [body["weight_version"] for body in bodies] == [None] * (len(bodies) - 1) + ["0"]
    assert before_pause == ["layout", "export"]
    assert trainer.steps == ["layout", *["export"] * len(lent), "end"]
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_only_ranks_beside_a_server_that_is_there_export(tmp_path: Path):
    """What is lent and not taken stays on the GPU: beside a server that is started again, a model at each update."""
    trainer, asked = Lender(), list[Any]()
    transfers = trainer.transfers

    async def watched(step: str, *arguments: Any, timeout_s: float) -> list[Any]:
        asked.append(arguments[2])
        return await transfers(step, *arguments, timeout_s=timeout_s)

    trainer.transfers = watched

    async def run() -> None:
        async with serving(FakeServer(), FakeServer()) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            spec = SyncSpec(20, tmp_path, 1, "gloo", bucket_mb=99, exporters=[{0}, {1, 2}])
            bound = make_sync("ipc", trainer, pool, spec)
            await bound.connect()
            await publish(bound, 0, 20)
            pool.leave(pool.servers[1])
            await publish(bound, 1, 20)
            pool.join(urls[1], 1)
            await publish(bound, 2, 20)

    asyncio.run(run())
    assert asked == [{0, 1, 2}, {0}, {0, 1, 2}]
    sender = IpcSender(Engine(), 0, "127.0.0.1")
    sender.layout(99)
    assert sender.export(0, tmp_path, {1}) is None
    assert sender._exported is None
    assert not list(tmp_path.rglob("bucket"))
    assert sender.export(0, tmp_path, {0})


def test_a_server_that_joins_while_weights_are_gathered_waits_for_the_next_ones(tmp_path: Path):
    """Nobody beside it lends yet, so that it would refuse weights, and the run would end."""
    trainer, joining = Lender(), FakeServer()
    transfers = trainer.transfers

    async def run() -> None:
        async with serving(FakeServer(), joining) as urls, ServerPool(urls[:1], "token", HUNG_S) as pool:

            async def gathered(step: str, *arguments: Any, timeout_s: float) -> list[Any]:
                if len(pool.servers) == 1:
                    pool.join(urls[1], 1)
                return await transfers(step, *arguments, timeout_s=timeout_s)

            trainer.transfers = gathered
            bound = make_sync(
                "ipc", trainer, pool, SyncSpec(20, tmp_path, 1, "gloo", bucket_mb=1, exporters=[{0}, {1}])
            )
            await bound.connect()
            await publish(bound, 0, 20)
            assert joining.requests == []
            assert len(pool.serving) == 1
            await publish(bound, 1, 20)
            assert len(pool.serving) == 2

    asyncio.run(run())


@pytest.mark.parametrize("requests", ["in_place", "recompute", "drain"])
@pytest.mark.parametrize("mode", ["disk", "collective"])
def test_no_update_asks_a_server_that_may_have_requests_to_flush_its_cache(mode: str, requests: Requests):
    """SGLang flushes unless it is told not to, and ends where anything runs or waits."""

    async def answer(server: FakeServer, body: Any) -> Any:
        await asyncio.sleep(0.01)
        return [output([]) for _ in body["input_ids"]]  # this server does not pause, so no version would be right

    async def ask(pool: ServerPool) -> None:
        while True:
            await pool.generate([[1]], Sampling(4, stop_token_ids=(7,)))

    async def run(server: FakeServer) -> None:
        async with serving(server) as urls, ServerPool(urls, "token", HUNG_S, requests=requests) as pool:
            bound = make_sync(mode, FakeTrainer(), pool, SyncSpec(20, Path("nowhere"), 1, "gloo", bucket_mb=1))
            await bound.connect()
            asking = [asyncio.create_task(ask(pool)) for _ in range(8)]
            for version in range(3):
                await publish(bound, version, 20)
                seen = len(server.bodies("/generate"))
                while len(server.bodies("/generate")) < seen + 2:  # the next update finds requests that run
                    await asyncio.sleep(0.001)
            for task in asking:
                task.cancel()

    server = FakeServer(answer)
    asyncio.run(run(server))
    updates = [body for path, body in server.requests if path.startswith("/update_weights")]
    assert [body["weight_version"] for body in updates if body["weight_version"]] == ["0", "1", "2"]
    assert [body["flush_cache"] for body in updates] == [False] * len(updates)
    assert not server.bodies("/flush_cache")


def test_a_checkpoint_is_read_by_servers_that_began_without_weights():
    """By default SGLang loads it as it loaded the first weights: not at all where these were made up."""

    async def run(server: FakeServer) -> None:
        async with serving(server) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            await publish(make_sync("disk", FakeTrainer(), pool, SyncSpec(20, Path("nowhere"), 1, "gloo", 1)), 0, 20)

    server = FakeServer()
    asyncio.run(run(server))
    assert [body["load_format"] for body in server.bodies("/update_weights_from_disk")] == ["auto"]


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_trainer_that_hangs_in_the_export_is_named_and_no_server(bucket: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync, "MARGIN_S", 5)
    server = busy_server()
    with pytest.raises(WorkerError, match=r"actor rank 0 failed during weight update \(prepare\): no answer"):
        asyncio.run(update(FakeTrainer(("prepare", bucket)), server, timeout_s=1))
    assert len(server.bodies("/update_weights_from_distributed")) == bucket


def test_a_server_that_does_not_receive_is_named():
    async def silence() -> Any:
        await asyncio.sleep(60)

    server = busy_server()
    server.answers["/update_weights_from_distributed"] = silence
    with pytest.raises(WeightUpdateError, match=r"server 0 at .*/update_weights_from_distributed did not answer"):
        asyncio.run(update(FakeTrainer(("send",)), server, timeout_s=1))


def test_rank_0_holds_one_bucket_beyond_the_model(monkeypatch: pytest.MonkeyPatch):
    sent = []
    monkeypatch.setattr(collective, "broadcast", lambda flat, **_: sent.append(flat.clone()))
    engine = Engine()
    sender = CollectiveSender(engine, 0, "127.0.0.1")
    sender._group = None
    buckets = sender.layout(bucket_mb=1)
    for number in range(len(buckets)):
        assert not sender.ready
        sender.prepare(number)
        sender.send()
    assert engine.most_held == 0
    assert [len(flat) for flat in sent] == [sum(spec.nbytes for spec in bucket) for bucket in buckets]
    assert all(len(flat) <= MIB for flat in sent)
    assert torch.cat(sent).view(torch.float32).unique().tolist() == [0, 1, 2, 3, 4]


def test_other_ranks_gather_with_it_and_keep_nothing():
    engine = Engine()
    sender = CollectiveSender(engine, 1, "127.0.0.1")
    for number in range(len(sender.layout(bucket_mb=1))):
        sender.prepare(number)
        sender.send()
        assert not sender.ready
    assert engine.most_held == 0
