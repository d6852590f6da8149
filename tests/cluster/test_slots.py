"""Asking a cluster for GPUs ends with an answer or a cause."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import WorkerCrashedError

from allocation import Device
from areal_like.cluster import placement
from areal_like.errors import ClusterError


class Task:
    """A Ray task whose result is what a coroutine gives."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def options(self, **_: Any) -> Task:
        return self

    def remote(self) -> Any:
        return self._answer()


async def silence() -> list[str]:
    await asyncio.sleep(60)
    return []


async def crash() -> list[str]:
    raise WorkerCrashedError


@pytest.mark.parametrize(
    ("answer", "message"),
    [(silence, "did not say within 0 s"), (crash, "did not say which .* died unexpectedly")],
)
def test_nodes_that_do_not_say_their_gpus(monkeypatch: pytest.MonkeyPatch, answer: Any, message: str) -> None:
    monkeypatch.setattr(ray, "remote", lambda _: Task(answer))
    monkeypatch.setattr(placement, "GPU_IDS_S", 0.01)
    group: Any = None
    with pytest.raises(ClusterError, match=message):
        asyncio.run(placement._gpu_ids(group, [[Device(0, 0)]], deadline=0))
