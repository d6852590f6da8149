"""Ray's head and the controller's host: a run ends without them, although Ray notices late that a host was cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from areal_like.backends.ray.heartbeat import accepts, wait_for_silence
from areal_like.core.errors import ClusterError

LOST_S = 30.0  # without an answer; Ray's own processes wait 60 s for a head that restarts
BEAT_S = 5.0
CLOSE_S = 15.0  # limit of the nodes' clean-up without the head; it continues without this process


@asynccontextmanager
async def head_watched(url: str) -> AsyncIterator[None]:
    """Raise ClusterError if the head of Ray's cluster is lost while the body runs."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch_head(url))
            yield
            watching.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        (error,) = group.exceptions
        raise error from error.__cause__


def head_url() -> str:
    """Return the URL of the head of the cluster that this process is connected to."""
    import ray

    return f"http://{ray.get_runtime_context().gcs_address}"


async def head_answers() -> bool:
    """Return whether the head accepts connections; without it, Ray's calls wait for minutes."""
    import ray

    return not ray.is_initialized() or await accepts(head_url(), BEAT_S)


async def _watch_head(url: str) -> None:
    await wait_for_loss([url])
    raise ClusterError(
        f"Ray's head at {urlsplit(url).netloc} did not answer for {LOST_S:g} s. A Ray cluster ends with its head: start Ray "
        "again on all hosts. With recover.mode=auto the same command then resumes from the last checkpoint"
    )


async def wait_for_loss(urls: Sequence[str]) -> None:
    """Return when one of the URLs has not accepted a connection for LOST_S seconds."""
    waiting = [asyncio.ensure_future(wait_for_silence(url, LOST_S, accepting=True)) for url in urls]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


async def accept(urls: Sequence[str], limit_s: float) -> bool:
    """Return whether all URLs accept connections again within the limit."""
    deadline = time.monotonic() + limit_s
    while not all(await asyncio.gather(*(accepts(url, BEAT_S) for url in urls))):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(1.0)
    return True
