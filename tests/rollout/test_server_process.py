"""The process around a server: what it is told, and what is said of it when it is late or ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from limits import HUNG_S

from allocation import ParallelSizes
from areal_like.cluster.lifetime import run_lifetime
from areal_like.config.load import load
from areal_like.demo.init_model import write_init_model
from areal_like.rollout.server import ServerSpec
from areal_like.rollout.sglang import process
from areal_like.rollout.sglang.options import server_arguments
from areal_like.rollout.sglang.process import ServerDied, SGLangServer

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
LOADED = "[2026-11-21] Load weight begin.\n[2026-11-21] Load weight end. elapsed=0.05 s\nSymmDeviceMemory"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SGLangServer]]:
    monkeypatch.setattr(process, "LAUNCHER", "slow_program")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    made = []

    def make(end: str, *, limit_s: float = HUNG_S) -> SGLangServer:
        monkeypatch.setenv("FAKE_END", end)
        monkeypatch.setenv("FAKE_LOG", LOADED)
        spec = ServerSpec("server-0", (), tmp_path / "server.log", secrets.token_hex(8), None, limit_s)
        made.append(SGLangServer(spec, "127.0.0.1"))
        return made[-1]

    yield make
    for one in made:
        one._process.kill()
        one._process.wait()


def test_a_server_that_is_late_is_told_with_how_far_it_came(server, tmp_path):
    (tmp_path / "server.log").write_text(LOADED)
    with pytest.raises(
        ServerDied, match=r"(?s)within 1 s .rollout.startup_timeout_s.; it last loaded the weights\n  the end of .*Symm"
    ):
        asyncio.run(server("hang", limit_s=1).start())


def test_a_server_that_is_late_does_not_stay(server):
    """Another is started in its place, on the same GPUs and perhaps the same port."""
    late = server("hang", limit_s=0.5)
    with pytest.raises(ServerDied, match="was not ready"):
        asyncio.run(late.start())
    assert late._process.wait(HUNG_S) == -signal.SIGKILL


def test_a_server_that_takes_a_request_and_never_answers_is_late_all_the_same(server):
    """Whoever started it waits 10 s longer at most, and would not have its last words."""
    with pytest.raises(ServerDied, match=r"within 3 s .*it last loaded the weights"):
        asyncio.run(asyncio.wait_for(server("mute", limit_s=3).start(), process.ANSWER_S))


def test_a_server_that_ends_early_is_told_with_its_last_words(server):
    with pytest.raises(ServerDied, match=r"(?s)server-0 ended before it was ready.*SymmDeviceMemory"):
        asyncio.run(server("end").start())


@pytest.mark.parametrize("own", [None, "eth7"])
def test_gloo_and_nccl_are_kept_on_the_interface_that_reaches_the_host(server, own, tmp_path, monkeypatch):
    if own:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", own)
    asyncio.run(server("serve").start())
    loopback = next(
        name for name, addresses in psutil.net_if_addrs().items() if "127.0.0.1" in [a.address for a in addresses]
    )
    assert f"sockets: {loopback} {own or loopback}" in (tmp_path / "server.log").read_text()


def test_the_end_of_a_server_is_noticed(server):
    async def run() -> None:
        serving = server("serve")
        await serving.start()
        watching = asyncio.create_task(serving.watch())
        await asyncio.sleep(0.2)
        assert not watching.done()
        serving._process.kill()
        await watching

    with pytest.raises(ServerDied, match=r"^server-0 ended with exit code -9\n"):  # the line that a user is told
        asyncio.run(run())


def test_a_wait_that_is_cancelled_leaves_nothing(server):
    async def run() -> None:
        serving = server("serve")
        await serving.start()
        before = psutil.Process().num_fds()
        watching = asyncio.create_task(serving.watch())
        await asyncio.sleep(0.1)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        deadline = time.monotonic() + HUNG_S  # threads of other tests may hold one for a moment
        while psutil.Process().num_fds() > before and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert psutil.Process().num_fds() <= before

    asyncio.run(run())


@pytest.mark.long
def test_a_server_ends_at_once_with_its_scheduler(tmp_path):
    config = load(DEMO, ["sglang.context_length=128"]).config
    write_init_model(config.actor.init_model, tmp_path / "model", seed=0)
    arguments = server_arguments(config, tmp_path / "model", ParallelSizes(), "cpu")

    async def run() -> None:
        serving = SGLangServer(
            ServerSpec("server-0", arguments, tmp_path / "server.log", "token", None, 600), "127.0.0.1"
        )
        await serving.start()
        (scheduler,) = [it for it in psutil.Process(serving._process.pid).children() if "scheduler" in it.name()]
        scheduler.kill()
        await serving.watch()

    with run_lifetime(secrets.token_hex(6)), pytest.raises(ServerDied, match="ended with exit code"):
        asyncio.run(run())
    log = (tmp_path / "server.log").read_text()
    assert "SIGQUIT received" in log
    assert "crash diagnostics" not in log  # for which it stays 5 s, and 65 s where another rank lives
