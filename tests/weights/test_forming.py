"""A server dies while the group of trainer and servers is formed: the others are let go, and it is formed again."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from fake_server import FakeServer, serving
from limits import HUNG_S
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from areal_like.backends import http
from areal_like.backends.transports.collective import controller
from areal_like.backends.transports.collective import rank as collective
from areal_like.backends.transports.collective.controller import GROUP, CollectiveSync
from areal_like.backends.transports.collective.giving_up import LOOK_S, GivenUp, wait_for
from areal_like.backends.transports.collective.rank import CollectiveSender
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.weights import SyncSpec, TensorSpec, publish


class Engine:
    def weights(self) -> Any:
        yield "weight", torch.arange(4.0)


def joined(address: str, port: int, rank: int, world_size: int) -> ProcessGroupGloo:
    """What a server's rank does; it would wait for half an hour."""
    limit = timedelta(minutes=30)
    store: Store = TCPStore(address, port, world_size, is_master=False, timeout=limit)
    for prefix in (GROUP, f"{GROUP}/", "cpu/"):  # as torch nests them
        store = PrefixStore(prefix, store)
    return ProcessGroupGloo(store, rank, world_size, limit)


def received(group: ProcessGroupGloo) -> Tensor:
    tensor = torch.zeros(16, dtype=torch.uint8)
    group.broadcast([tensor]).wait()
    return tensor.view(torch.float32)


def test_who_waits_for_a_server_that_never_comes_is_let_go_and_may_join_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collective, "FORMING", timedelta(seconds=2))
    sender = CollectiveSender(Engine(), 0, "127.0.0.1")  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        address, port = sender.open(3, GROUP, HUNG_S)  # type: ignore[misc]
        waiting: Future[ProcessGroupGloo] = threads.submit(joined, address, port, 1, 3)
        with pytest.raises(RuntimeError):
            sender.join("gloo")
        with pytest.raises(RuntimeError):
            waiting.result(HUNG_S)
        sender.close()
        address, port = sender.open(2, GROUP, HUNG_S)  # type: ignore[misc]
        waiting = threads.submit(joined, address, port, 1, 2)
        sender.join("gloo")
        group = waiting.result(HUNG_S)
        sender.layout(1)
        sender.prepare(0)
        getting = threads.submit(received, group)
        sender.send()
        assert getting.result(HUNG_S).tolist() == [0, 1, 2, 3]
        sender.close()


class Trainer:
    """Notes what it is asked for; the first group waits for a server that never comes."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        self.steps.append(step)
        if self.steps.count("join") == 1 and step == "join":
            await asyncio.sleep(600)
        if step == "open":
            return "127.0.0.1", 1
        return [[TensorSpec("weight", "float32", (1,), 4)]] if step == "layout" else None


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_server_that_dies_while_the_group_is_formed_costs_no_run(backend: Any, monkeypatch: pytest.MonkeyPatch):
    for module in (http, controller):
        monkeypatch.setattr(module, "AFTERMATH_S", 0.1)

    async def run() -> None:
        dying, other = FakeServer(), FakeServer()
        async with serving(dying, other) as urls, ServerPool(urls, "token", HUNG_S) as pool:

            async def die() -> Any:
                pool.leave(pool.servers[0], "ended with exit code -9")
                raise ConnectionResetError

            async def hold() -> Any:
                return {"weight_version": "0"}

            dying.answers["/init_weights_update_group"] = die
            other.answers["/model_info"] = hold
            trainer: Any = Trainer()
            sync = CollectiveSync(trainer, pool, SyncSpec(20, Path(), 1, backend, 1))
            await publish(sync, 0, 20)
            assert [server.url for server in pool.serving] == [other.url]
            assert trainer.steps == ["open", "join", "close", "open", "join", "layout", "prepare", "send"]
            assert [body["world_size"] for body in other.bodies("/init_weights_update_group")] == [3, 2]
            assert len(other.bodies("/destroy_weights_update_group")) == 1

    asyncio.run(asyncio.wait_for(run(), HUNG_S))


class Large:
    """An engine with more bytes than the buffers of a connection hold."""

    def weights(self) -> Any:
        yield "weight", torch.zeros(16 << 20)


def test_an_update_that_is_given_up_ends_for_the_trainer_and_for_servers_that_are_well(monkeypatch: pytest.MonkeyPatch):
    sender = CollectiveSender(Large(), 0, "127.0.0.1")  # type: ignore[arg-type]
    cancelled = Event()
    monkeypatch.setattr(collective, "is_cancelled", cancelled.is_set)
    with ThreadPoolExecutor(3) as threads:
        address, port = sender.open(3, GROUP, HUNG_S)  # type: ignore[misc]
        joining = [threads.submit(joined, address, port, rank, 3) for rank in (1, 2)]
        sender.join("gloo")
        groups = [future.result(HUNG_S) for future in joining]
        sender.layout(64)
        sender.prepare(0)
        sending = threads.submit(sender.send)  # to nobody who receives
        work = groups[0].allreduce([torch.zeros(4)])  # with the one that is lost
        receiving = threads.submit(wait_for, work, groups[0], cancelled.is_set)
        assert wait((sending, receiving), timeout=3 * LOOK_S).not_done == {sending, receiving}
        cancelled.set()
        for call in (sending, receiving):
            with pytest.raises(GivenUp):
                call.result(HUNG_S)
        sender.close()


def test_a_call_that_fails_or_succeeds_is_not_given_up():
    class Call:
        def __init__(self, error: str) -> None:
            self.error, self.waits = error, 0

        def wait(self, limit: timedelta | None = None) -> None:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")
            if self.error:
                raise RuntimeError(self.error)

        def is_completed(self) -> bool:
            return self.waits > 1

    wait_for(Call(""), None, lambda: False)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_for(Call("Connection closed by peer"), None, lambda: False)  # type: ignore[arg-type]
