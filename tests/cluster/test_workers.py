"""What a call of a group raises where it is not even sent."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from limits import HUNG_S
from ray.exceptions import ObjectStoreFullError

from areal_like.backends.ray.workers import WorkerGroup, WorkerHandle
from areal_like.core.errors import WorkerError


class Full:
    """An actor whose node has no room for the arguments."""

    @property
    def call(self) -> Any:
        return self

    def remote(self, *args: Any) -> Any:
        raise ObjectStoreFullError("no room for 1 GB")


@pytest.mark.parametrize("ask", ["call_one", "call_all"])
def test_a_full_object_store_is_told_as_the_worker_s_failure(ask: str):
    group = WorkerGroup("client", [WorkerHandle(0, "127.0.0.1", Full(), Path("client-0.log"))], HUNG_S)  # type: ignore[arg-type]
    where = [0] if ask == "call_one" else []
    with pytest.raises(WorkerError, match=r"client rank 0 failed during reading: .* not sent: no room for 1 GB"):
        asyncio.run(getattr(group, ask)(*where, "exchange", phase="reading"))
