"""How new weights reach the servers: either all of them acknowledge version v, or the update fails with a cause in time."""

from __future__ import annotations

import asyncio
from typing import Protocol

from areal_like.rollout.client import ServerError


class WeightUpdateError(RuntimeError):
    """Weights did not reach every server; the message names version, transport and cause."""


class WeightSync(Protocol):
    """One way of bringing the trainer's weights to every server."""

    async def connect(self) -> None:
        """Prepare what lasts for the whole run."""

    async def send(self, version: int) -> None:
        """Bring the trainer's current weights to every server, labelled `version`; they acknowledge it."""


async def publish(sync: WeightSync, version: int, timeout_s: float) -> None:
    """Send the weights within `timeout_s`; raises WeightUpdateError where a server did not get all of them."""
    mode = type(sync).__name__
    try:
        async with asyncio.timeout(timeout_s):
            await sync.send(version)
    except TimeoutError:
        raise WeightUpdateError(
            f"weights of version {version} did not reach every server within {timeout_s:g} s over {mode}: "
            "raise weight_update.timeout_s if the model is that large"
        ) from None
    except ServerError as error:
        raise WeightUpdateError(f"weights of version {version} over {mode}: {error}") from error
