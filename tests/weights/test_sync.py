"""Weights reach every server, which then says so and really uses them; or the update fails in time and says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
from aiohttp import web
from fake_server import FakeServer, serving
from limits import HUNG_S
from local_trainer import LocalTrainer
from safetensors.numpy import load_file, save_file

from areal_like.backends import http as client
from areal_like.core import weights as sync
from areal_like.core.errors import ServerError, WeightUpdateError, WorkerError
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.weights import SyncSpec, WeightSync, make_sync, publish

pytestmark = pytest.mark.covers("updates: collective", "updates: disk")

PROMPT = [5, 9, 11]


@pytest.fixture(scope="module")
def models(sglang_server: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [real.peaked_model(sglang_server.model, folder / str(seed), seed) for seed in range(3)]


def sync_over(mode: str, trainer: Any, pool: ServerPool, directory: Path, timeout_s: float) -> WeightSync:
    return make_sync(mode, trainer, pool, SyncSpec(timeout_s, directory, 1, "gloo", bucket_mb=1, prefetch_mb=2))


@asynccontextmanager
async def connected(mode: str, trainer: Any, server: Any, directory: Path) -> AsyncIterator[tuple[WeightSync, Any]]:
    """A connected sync on the session's server, which forgets the process group afterwards."""
    async with real.pool_on(server) as pool:
        bound = sync_over(mode, trainer, pool, directory, HUNG_S)
        await bound.connect()
        try:
            yield bound, pool
        finally:
            if mode == "collective":
                await trainer.transfer("close", timeout_s=HUNG_S)
                await pool.servers[0].leave_group(pool.servers[0].group, HUNG_S)


@pytest.mark.parametrize("mode", ["disk", "collective", "ipc"])
def test_servers_acknowledge_each_version_and_serve_its_weights(sglang_server, models, tmp_path, mode):
    trainer = LocalTrainer(models[0], mode=mode)
    (tmp_path / "config.yaml").write_text("the run's")

    async def run() -> None:
        async with connected(mode, trainer, sglang_server, tmp_path) as (bound, pool):
            for version, trainer.model in enumerate(models):
                await publish(bound, version, HUNG_S)
                assert pool.version == version
                assert await pool.servers[0].weight_version(HUNG_S) == str(version)
                (response,) = await pool.generate([PROMPT], Sampling(8))
                assert set(response.versions) == {version}
                expected = [real.transformers_logprobs(model, PROMPT, response.tokens) for model in models]
                np.testing.assert_allclose(response.logprobs, expected[version], atol=1e-4)
                assert np.abs(expected[version] - expected[version - 1]).max() > 0.1

    asyncio.run(run())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.yaml"]
    assert len(trainer.saved) == (len(models) if mode == "disk" else 0)


@pytest.mark.parametrize("mode", ["disk", "collective", "ipc"])
def test_weights_that_a_server_cannot_load_are_no_update(sglang_server, models, tmp_path, mode):
    """A missing file, and a tensor of another shape. (SGLang 0.5.17 dies of a wrong shape on disk.)"""
    broken = real.peaked_model(sglang_server.model, tmp_path / "broken", 0)
    if mode == "disk":
        (broken / "model.safetensors").unlink()
    else:
        weights = load_file(broken / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"][:-8]
        save_file(weights, broken / "model.safetensors", {"format": "pt"})

    async def run() -> None:
        async with connected(mode, LocalTrainer(broken, mode=mode), sglang_server, tmp_path) as (bound, _):
            await publish(bound, 1, HUNG_S)

    with pytest.raises(
        WeightUpdateError, match=r"weight update to version 1 failed: server 0 .*/update_weights_from_.*[Ff]ailed"
    ):
        asyncio.run(run())


async def silence() -> Any:
    await asyncio.sleep(600)


async def refusal() -> Any:
    return {"success": False, "message": "no such model"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [(refusal, "server 1 refused {path}: no such model"), (silence, "server 1 at .*{path} did not answer within")],
    ids=["refusal", "silence"],
)
@pytest.mark.parametrize("mode", ["disk", "collective"])
def test_one_server_without_the_weights_fails_the_update(models, tmp_path, mode, answer, words):
    path = "/update_weights_from_disk" if mode == "disk" else "/init_weights_update_group"

    async def update(bad: FakeServer) -> None:
        bad.answers[path] = answer
        async with serving(FakeServer(), bad) as urls, ServerPool(urls, "token", 600) as pool:
            bound = sync_over(mode, LocalTrainer(models[0]), pool, tmp_path, 5)
            await bound.connect()
            await publish(bound, 1, 5)

    with pytest.raises(WeightUpdateError, match=words.format(path=path)):
        asyncio.run(update(FakeServer()))
    assert not list(tmp_path.iterdir())


def test_a_trainer_that_dies_is_told_before_what_that_does_to_the_servers(models, tmp_path):
    class Dying(LocalTrainer):
        async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
            if step == "send":
                await asyncio.sleep(0.3)  # noticed later than the broken connection
                raise WorkerError("actor", 0, "weight update", "the process died", tmp_path)
            return None if step == "join" else await super().transfer(step, *arguments, timeout_s=timeout_s)

    async def broken() -> Any:
        return web.Response(status=400, text="connection closed by peer")

    async def update() -> None:
        server = FakeServer()
        server.answers["/update_weights_from_distributed"] = broken
        async with serving(server) as urls, ServerPool(urls, "token", 600) as pool:
            bound = sync_over("collective", Dying(models[0]), pool, tmp_path, 300)
            await bound.connect()
            await publish(bound, 1, 300)

    with pytest.raises(WorkerError, match="actor rank 0 failed during weight update: the process died"):
        asyncio.run(update())


def test_a_server_that_keeps_generating_fails_the_update(models, tmp_path):
    async def update() -> None:
        started = asyncio.Event()

        async def generate(server: FakeServer, body: Any) -> Any:
            started.set()
            await asyncio.sleep(600)

        async with serving(FakeServer(generate)) as urls, ServerPool(urls, "token", 600, requests="drain") as pool:
            async with pool.interrupt(0, Deadline(300)):
                pass
            asking = asyncio.create_task(pool.generate([PROMPT], Sampling(8)))
            await started.wait()
            try:
                await publish(sync_over("disk", LocalTrainer(models[0]), pool, tmp_path, 1), 1, 1)
            finally:
                asking.cancel()

    with pytest.raises(WeightUpdateError, match=r"server 0 made no progress for 1 s .*=drain"):
        asyncio.run(update())


def test_a_trainer_that_is_late_fails_the_update(models, tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "MARGIN_S", 0.2)

    class Late(LocalTrainer):
        async def save_hf(self, *_: Any, **__: Any) -> None:
            await asyncio.sleep(600)

    async def update() -> None:
        async with serving(FakeServer()) as urls, ServerPool(urls, "token", 600) as pool:
            await publish(sync_over("disk", Late(models[0]), pool, tmp_path, 0.2), 1, 0.2)

    with pytest.raises(
        WeightUpdateError, match=r"update to version 1 failed: the trainer did not finish within 0\.2 s"
    ):
        asyncio.run(update())


def test_a_server_that_died_fails_the_update(models, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "AFTERMATH_S", 0.1)

    async def update() -> None:
        async with serving(FakeServer()) as urls:
            pass
        async with ServerPool(urls, "token", 600) as pool:
            await publish(sync_over("disk", LocalTrainer(models[0]), pool, tmp_path, 300), 1, 300)

    with pytest.raises(WeightUpdateError, match=r"server 0 at .* failed: "):
        asyncio.run(update())


def test_a_server_that_joins_gets_all_weights_with_the_next_version(sglang_server, models, tmp_path):
    trainer = LocalTrainer(models[0])

    async def run() -> None:
        async with connected("collective", trainer, sglang_server, tmp_path) as (bound, pool):
            await publish(bound, 0, HUNG_S)
            (first,) = pool.servers
            await first.leave_group(first.group, HUNG_S)  # as if it were another process
            pool.leave(first)
            pool.join(sglang_server.url, 0)
            trainer.model = models[1]
            await publish(bound, 1, HUNG_S)
            (response,) = await pool.generate([PROMPT], Sampling(8))
            expected = real.transformers_logprobs(models[1], PROMPT, response.tokens)
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)

    asyncio.run(run())


def test_a_server_waits_no_longer_for_weights_that_were_given_up(sglang_server, models, tmp_path):
    trainer = LocalTrainer(models[0])

    async def run() -> None:
        async with connected("collective", trainer, sglang_server, tmp_path) as (bound, pool):
            await publish(bound, 0, HUNG_S)
            (server,) = pool.servers
            buckets = [[("weight", "uint8", (8,))]]
            async with pool.interrupt(0, Deadline(HUNG_S)):
                receiving = asyncio.create_task(server.receive(server.group, buckets, 1, HUNG_S))
                await server.give_up_group(server.group, HUNG_S)
                with pytest.raises(ServerError, match="GivenUp: the weight update was aborted"):
                    await receiving
            with pytest.raises(ServerError, match="not the name of a process group"):
                await server.give_up_group("../other", HUNG_S)
            await trainer.transfer("close", timeout_s=HUNG_S)
            await server.leave_group(server.group, HUNG_S)
            await bound.connect()
            trainer.model = models[1]
            await publish(bound, 1, HUNG_S)
            assert await server.weight_version(HUNG_S) == "1"

    asyncio.run(run())
