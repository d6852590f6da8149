"""Servers download weights with the run's token, over links that are slow and lose connections."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import serving as real
from fake_server import FakeServer, serving
from limits import HUNG_S
from local_trainer import LocalTrainer
from slow_link import Fault, slow_link

from areal_like.backends.sglang import DOWNLOAD
from areal_like.backends.sglang.patches import downloads
from areal_like.backends.sglang.patches.downloads import DownloadError, Downloads
from areal_like.backends.transports.deltas.controller import ServerDownloads
from areal_like.backends.transports.deltas.file_server import FileServer
from areal_like.backends.transports.deltas.files import check
from areal_like.core.errors import WeightUpdateError
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.transfer import Chain, FileSource, WeightFile, locate
from areal_like.core.weights import SyncSpec, make_sync, publish

pytestmark = pytest.mark.covers("updates: disk")

TOKEN = "the-run's-token"
SIZE = 3 << 20


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightFile:
    """A file below `served`, and this server's temporary directory elsewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "served").mkdir()
    path = tmp_path / "served" / "3-abc.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return WeightFile(path.name, downloads._sha256(path), SIZE)


def fetch(source: FileSource, *files: WeightFile, keep: Any = (), timeout_s: float = 60) -> Awaitable[None]:
    kept = [file.path for file in files] + list(keep)
    return asyncio.to_thread(Downloads().fetch, source, files, kept, timeout_s)


def over_link(folder: Path, body: Callable[[str, Any], Awaitable[None]], **link: Any) -> None:
    async def run() -> None:
        with FileServer(folder, "127.0.0.1", TOKEN) as url:
            async with slow_link(url, **link) as (slow_url, counted):
                await body(slow_url, counted)

    asyncio.run(run())


FAULTS: list[list[Fault]] = [[("close", 1 << 20)], [("stall", 1 << 20)], [("close", 0), ("close", 10), ("stall", SIZE)]]


@pytest.mark.parametrize("faults", FAULTS)
def test_a_download_continues_where_the_link_failed(
    tmp_path: Path, written: WeightFile, monkeypatch: pytest.MonkeyPatch, faults: list[Fault]
) -> None:
    monkeypatch.setattr(downloads, "SILENCE_S", 1.0)

    async def body(url: str, link: Any) -> None:
        await fetch(FileSource(url, TOKEN), written)
        check(locate(written.path), written.sha256)
        assert link.connections == len(faults) + 1
        assert link.sent < 1.5 * SIZE  # nothing was sent twice but what the proxy had read

    over_link(tmp_path / "served", body, faults=faults)


def test_a_link_is_as_slow_as_it_is_told(tmp_path: Path, written: WeightFile) -> None:
    async def body(url: str, link: Any) -> None:
        begun = asyncio.get_running_loop().time()
        await fetch(FileSource(url, TOKEN), written)
        assert asyncio.get_running_loop().time() - begun > 2 * 0.1 + SIZE / (10 << 20)

    over_link(tmp_path / "served", body, delay_s=0.1, bytes_per_s=10 << 20)


def test_the_file_server_wants_the_token_and_serves_weights_alone(tmp_path: Path, written: WeightFile) -> None:
    (tmp_path / "served" / "secrets.txt").write_text("no")

    async def body(url: str, _: Any) -> None:
        async with aiohttp.ClientSession() as session:
            for name, token, status in (
                (written.path, TOKEN, 200),
                (written.path, "", 401),
                (written.path, "other", 401),
                ("v1/models", "", 401),
                ("", "", 401),
                ("v1/models", TOKEN, 404),
                ("secrets.txt", TOKEN, 404),
                ("..%2Fserved%2F3-abc.safetensors", TOKEN, 404),
                ("4-abc.safetensors", TOKEN, 404),
            ):
                async with session.get(f"{url}/{name}", headers={"Authorization": f"Bearer {token}"}) as answer:
                    assert answer.status == status, name
        with pytest.raises(DownloadError, match=r"3-abc\.safetensors: HTTP status 401"):
            await fetch(FileSource(url, "other"), written)
        with pytest.raises(DownloadError, match=r"4-abc\.safetensors: HTTP status 404"):
            await fetch(FileSource(url, TOKEN), written._replace(path="4-abc.safetensors"), timeout_s=1)

    over_link(tmp_path / "served", body)


def test_a_corrupt_file_is_named_and_not_kept(tmp_path: Path, written: WeightFile) -> None:
    async def body(url: str, link: Any) -> None:
        with pytest.raises(DownloadError, match=r"3-abc\.safetensors: its SHA-256 differs from the trainer's"):
            await fetch(FileSource(url, TOKEN), written._replace(sha256="0" * 64))
        assert link.connections >= 1
        assert not list(locate("").iterdir())

    over_link(tmp_path / "served", body)


def test_files_that_no_server_needs_any_more_are_removed(tmp_path: Path, written: WeightFile) -> None:
    async def body(url: str, _: Any) -> None:
        locate("").mkdir()
        for name in ("old.safetensors", "other.safetensors.partial", "kept.safetensors"):
            locate(name).touch()
        await fetch(FileSource(url, TOKEN), written, keep=["kept.safetensors"])
        assert {path.name for path in locate("").iterdir()} == {"kept.safetensors", written.path}

    over_link(tmp_path / "served", body)


def test_a_newer_request_ends_an_older_one(tmp_path: Path, written: WeightFile) -> None:
    async def body(url: str, _: Any) -> None:
        own, source = Downloads(), FileSource(url, TOKEN)
        older, newer = (
            asyncio.ensure_future(asyncio.to_thread(own.fetch, source, [written], [written.path], 60.0))
            for _ in range(2)
        )
        with pytest.raises(DownloadError, match="a newer update has begun"):
            await older
        await newer
        check(locate(written.path), written.sha256)

    over_link(tmp_path / "served", body, bytes_per_s=4 << 20)


@contextmanager
def python_web_server(folder: Path) -> Iterator[str]:
    """Serve a folder with Python's own web server, which knows no ranges; yield its URL."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout
            yield re.findall(r"http://\S+", process.stdout.readline())[0].rstrip("/)")
        finally:
            process.kill()


def test_another_web_server_serves_the_files_over_a_link_that_fails(tmp_path: Path, written: WeightFile) -> None:
    async def run() -> None:
        with python_web_server(tmp_path) as url:
            async with slow_link(url, delay_s=0.05, bytes_per_s=20e6, faults=[("close", 1 << 20)]) as (slow_url, link):
                await fetch(FileSource(f"{slow_url}/served", None), written)
                check(locate(written.path), written.sha256)
                assert link.connections == 2
                missing = written._replace(path="4-abc.safetensors")
                with pytest.raises(DownloadError, match=r"served/4-abc\.safetensors: HTTP status 404"):
                    await fetch(FileSource(f"{slow_url}/served", None), missing, timeout_s=1)

    asyncio.run(run())


def chain_of(*versions: int) -> Chain:
    files = [WeightFile(f"{version}.safetensors", "", 1) for version in versions]
    return Chain(files)


class Downloading(FakeServer):
    """Answers downloads when it `may`; `asked` has the files of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.fails, self.asked = asyncio.Event(), False, list[list[str]]()
        self.may.set()
        self.answers[DOWNLOAD] = self.download

    async def download(self) -> Any:
        self.asked.append([file[0] for file in self.bodies(DOWNLOAD)[-1]["files"]])
        await self.may.wait()
        return {"success": not self.fails, "message": "no route"}


async def updated(pool: ServerPool, tracker: ServerDownloads, version: int, chain: Chain) -> list[str]:
    """Bring the pool to a version; return the names of the servers that took part."""
    servers = await tracker.bring(chain, Deadline(HUNG_S))
    async with pool.interrupt(version, Deadline(HUNG_S), servers):
        for server in servers:
            await server.load("", version, HUNG_S)
    return [server.name for server in servers]


def test_nobody_waits_for_a_server_that_joins_over_a_slow_link() -> None:
    async def run() -> None:
        always, late = Downloading(), Downloading()
        async with serving(always, late) as urls, ServerPool(urls[:1], "token", HUNG_S) as pool:
            tracker = ServerDownloads(pool, FileSource("http://files", "token"))
            assert await updated(pool, tracker, 0, chain_of(0)) == ["server 0"]
            pool.join(urls[1], 1)
            late.may.clear()
            assert await updated(pool, tracker, 1, chain_of(0, 1)) == ["server 0"]
            assert await updated(pool, tracker, 2, chain_of(0, 1, 2)) == ["server 0"]
            late.may.set()
            while tracker._states.get(pool.servers[1]) is None:
                await asyncio.sleep(0.01)
            assert await updated(pool, tracker, 3, chain_of(0, 1, 2, 3)) == ["server 0", "server 1"]
            assert pool.serving == pool.servers
            bridged = Chain([WeightFile("4.safetensors", "", 1)], "3.safetensors", WeightFile("4.delta", "", 1))
            assert len(await updated(pool, tracker, 4, bridged)) == 2
        names = [["0"], ["1"], ["2"], ["3"]]
        assert always.asked == [[f"{name}.safetensors" for name in each] for each in names] + [["4.delta"]]
        assert late.asked == [["0.safetensors", "1.safetensors"], ["2.safetensors", "3.safetensors"], ["4.delta"]]

    asyncio.run(run())


def test_a_new_full_copy_ends_the_download_of_a_late_server() -> None:
    async def run() -> None:
        always, late = Downloading(), Downloading()
        async with serving(always, late) as urls, ServerPool(urls[:1], "token", HUNG_S) as pool:
            tracker = ServerDownloads(pool, FileSource("http://files", "token"))
            await updated(pool, tracker, 0, chain_of(0))
            pool.join(urls[1], 1)
            late.may.clear()
            await updated(pool, tracker, 1, chain_of(0, 1))
            late.may.set()
            await updated(pool, tracker, 2, chain_of(2))
            while len(late.asked) < 2 or tracker._states.get(pool.servers[1]) is None:
                await asyncio.sleep(0.01)
            assert len(await updated(pool, tracker, 3, chain_of(2, 3))) == 2
        assert late.asked[:2] == [["0.safetensors", "1.safetensors"], ["2.safetensors"]]

    asyncio.run(run())


def test_a_server_that_cannot_download_leaves_the_others_to_go_on() -> None:
    async def run() -> None:
        well, cut = Downloading(), Downloading()
        async with serving(well, cut) as urls, ServerPool(urls, "token", HUNG_S) as pool:
            tracker = ServerDownloads(pool, FileSource("http://files", "token"))
            await updated(pool, tracker, 0, chain_of(0))
            cut.fails, lost = True, pool.servers[1]
            assert await updated(pool, tracker, 1, chain_of(0, 1)) == ["server 0"]
            assert "did not download the weights: server 1 refused /download_weights: no route" in lost.left.result()
            well.fails = True
            with pytest.raises(Exception, match="server 0 refused /download_weights: no route"):
                await updated(pool, tracker, 2, chain_of(0, 1, 2))

    asyncio.run(run())


@pytest.mark.long
def test_a_real_server_downloads_over_a_link_that_loses_connections(sglang_server: Any, tmp_path: Path) -> None:
    """Full copy, delta and bridge, bit for bit by its log-probs; then a wrong token is told with the URL."""
    models = [real.peaked_model(sglang_server.model, tmp_path / str(seed), seed) for seed in range(2)]
    trainer, folder = LocalTrainer(models[0], mode="deltas"), tmp_path / "files"

    async def run() -> None:
        with FileServer(folder, "127.0.0.1", TOKEN) as url:
            faults: list[Fault] = [("close", 100_000), ("close", 200_000), ("close", 150_000)]
            async with (
                slow_link(url, delay_s=0.02, bytes_per_s=20e6, faults=faults) as (files_url, link),
                slow_link(sglang_server.url, delay_s=0.02) as (server_url, _),
                real.pool_on(replace(sglang_server, url=server_url)) as pool,
            ):
                spec = SyncSpec(HUNG_S, folder, 1, "gloo", 1, full_every=2, source=FileSource(files_url, TOKEN))
                bound = make_sync("deltas", trainer, pool, spec)  # type: ignore[arg-type]
                for version, model in enumerate([models[0], models[1], models[0], models[1]]):
                    trainer.model = model
                    await publish(bound, version, HUNG_S)
                    (response,) = await pool.generate([[5, 9, 11]], Sampling(8))
                    expected = real.transformers_logprobs(model, [5, 9, 11], response.tokens)
                    np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
                    assert set(response.versions) == {version}
                assert link.connections >= 4
                assert not link.faults
                wrong = SyncSpec(HUNG_S, folder, 1, "gloo", 1, source=FileSource(files_url, "wrong"))
                with pytest.raises(WeightUpdateError, match=r"4-\w+\.safetensors: HTTP status 401"):
                    await publish(make_sync("deltas", trainer, pool, wrong), 4, HUNG_S)  # type: ignore[arg-type]

    asyncio.run(run())
