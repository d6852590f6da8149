"""Asking a cluster for GPUs ends with an answer or a cause."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import WorkerCrashedError

from areal_like.cluster import placement, ray_cluster
from areal_like.config.schema import SchedulerConfig
from areal_like.errors import ClusterError


class Task:
    """A Ray task whose result is what a coroutine gives."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def options(self, **_: Any) -> Task:
        return self

    def remote(self) -> Any:
        return self._answer()


async def silence() -> None:
    await asyncio.sleep(600)


async def crash() -> None:
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
        asyncio.run(placement._granted_gpus(group, [{"GPU": 1.0}], deadline=0))


def test_a_private_cluster_that_is_not_up_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as ray/_private/node.py does after 30 s

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray_cluster, "_configure", lambda _: None)
    cluster = ray_cluster.ray_cluster(SchedulerConfig(), n_slots=1, uses_gpus=False, directory=tmp_path)
    with pytest.raises(ClusterError, match="private Ray cluster did not accept this run: The current node"), cluster:
        pass
