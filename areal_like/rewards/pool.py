"""A killable pool: a response that cannot be judged in time is missing, never 0, and costs its neighbours nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Self

from pebble import ProcessExpired, ProcessPool


@dataclass(frozen=True)
class Verifier:
    """How responses of one reward type are judged; both functions take (response, reference answer).

    `quick` answers at once or with None where `verify` has to look; where it answers, `verify` would say the same.
    `verify` is a module's own function, so that a worker process can import it.
    """

    quick: Callable[[str, str], float | None]
    verify: Callable[[str, str], float]


class RewardPool:
    """Judges responses; `async with RewardPool(...) as pool` leaves no process behind.

    Time limits count from when a worker takes up a response, not from when it is handed in.
    """

    def __init__(self, verifier: Verifier, *, timeout_s: float, workers: int) -> None:
        self._verifier, self._timeout_s = verifier, timeout_s
        # spawn: the caller has threads, which a forked child would not survive
        self._pool = ProcessPool(
            max_workers=workers,
            initializer=_start_worker,
            initargs=(verifier.verify,),
            context=multiprocessing.get_context("spawn"),
        )

    async def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        """Rewards of responses against their reference answers; None where the verifier timed out or broke."""
        pairs = zip(responses, answers, strict=True)
        return list(await asyncio.gather(*(self._score_one(*pair) for pair in pairs)))

    async def close(self) -> None:
        """End the worker processes at once, unfinished work included."""
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _score_one(self, response: str, answer: str) -> float | None:
        reward = self._verifier.quick(response, answer)
        if reward is not None:
            return reward
        future = self._pool.schedule(self._verifier.verify, args=(response, answer), timeout=self._timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except (FutureTimeoutError, ProcessExpired):
            return None


def _start_worker(verify: Callable[[str, str], float]) -> None:
    """Tie a new worker's life to the parent's, and load what the verifier imports outside any time limit."""
    parent = multiprocessing.parent_process()
    if parent is not None:  # always, in a pool's worker
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    verify("", "")


def _end_with(sentinel: int) -> None:
    """End this process when the one behind the sentinel is gone, however that ended."""
    connection.wait([sentinel])
    os._exit(1)
