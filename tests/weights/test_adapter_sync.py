"""Which adapters a weight update sends to which server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from areal_like.rollout.http import Deadline
from areal_like.weights.adapters import controller
from areal_like.weights.adapters.controller import AdapterSync

pytestmark = pytest.mark.covers("LoRA")


class FakeServer:
    def __init__(self) -> None:
        self.received: list[list[str]] = []

    async def load_adapters(self, paths: Mapping[str, str], version: int, timeout_s: float) -> None:
        self.received.append(sorted(paths))


class FakeTrainer:
    def __init__(self) -> None:
        self.trained = 0

    async def save_adapters(self, path: Path, *, phase: str, timeout_s: float) -> None: ...


def test_a_server_receives_what_was_trained_and_all_adapters_of_a_version_that_is_sent_again(monkeypatch, tmp_path):
    first, late, trainers = FakeServer(), FakeServer(), {name: FakeTrainer() for name in ("math", "code")}
    pool = SimpleNamespace(servers=[first])

    async def send_once(pool: Any, save: Any, path: Path, load: Any, version: int, deadline: Deadline) -> None:
        await save(path, phase="weight update", timeout_s=deadline.left)
        for server in pool.servers:
            await load(server)

    monkeypatch.setattr(controller, "send_once", send_once)
    spec = SimpleNamespace(adapters=trainers, directory=tmp_path)
    sync = AdapterSync(cast(Any, None), cast(Any, pool), cast(Any, spec))

    async def run() -> None:
        await sync.send(0, Deadline(60.0))
        trainers["code"].trained = 1
        pool.servers.append(late)
        await sync.send(1, Deadline(60.0))
        await sync.send(2, Deadline(60.0))
        await sync.send(2, Deadline(60.0))  # as the drift alarm does

    asyncio.run(run())
    assert first.received == [["code", "math"], ["code"], [], ["code", "math"]]
    assert late.received == [["code", "math"], [], ["code", "math"]]
