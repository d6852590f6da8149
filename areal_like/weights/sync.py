"""How new weights reach the servers: all of them acknowledge version v, or the update fails in time, with a cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from areal_like.errors import ServerError, WeightUpdateError
from areal_like.rollout.sglang.http import AFTERMATH_S

MARGIN_S = 2 * AFTERMATH_S + 2  # the requests' own limits, which name the server that is late, speak first


class WeightSync(Protocol):
    """One way of bringing the trainer's weights to every server."""

    async def connect(self) -> None:
        """Prepare what lasts for the whole run."""

    async def send(self, version: int) -> None:
        """Bring the trainer's current weights to every server, labelled `version`; they acknowledge it."""


async def publish(sync: WeightSync, version: int, timeout_s: float) -> None:
    """Send the weights within `timeout_s`; raises WeightUpdateError where a server did not get all of them."""
    async with limited(f"weights of version {version} over {type(sync).__name__}", timeout_s):
        await sync.send(version)


@asynccontextmanager
async def limited(what: str, timeout_s: float) -> AsyncIterator[None]:
    """End the body at its time limit and tell its failures as a WeightUpdateError about `what`."""
    try:
        async with asyncio.timeout(timeout_s + MARGIN_S):
            yield
    except TimeoutError:
        raise WeightUpdateError(
            f"{what}: the trainer did not finish within {timeout_s:g} s; raise weight_update.timeout_s if the model is "
            "that large"
        ) from None
    except ServerError as error:
        raise WeightUpdateError(f"{what}: {error}") from error
