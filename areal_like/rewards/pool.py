"""A killable pool: a response that cannot be judged in time is missing, never 0, and costs its neighbours nothing.

Workers are forked from multiprocessing's forkserver, which has imported the verifier's libraries: to replace one that
was killed takes milliseconds. The forkserver starts with the first response that needs a worker, and ends with this
process. It is one for all pools of a process and keeps what the first of them preloaded.
"""

import asyncio
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from multiprocessing import connection

from pebble import ProcessExpired, ProcessPool

type Judge = Callable[[str, str], float]


@dataclass(frozen=True)
class Verifier:
    """How responses of one reward type are judged.

    `check` takes a reference answer and says what it lacks and what would do, None where nothing is wrong with it.
    `quick` and `verify` take (response, reference answer). `quick` answers at once, or with None where `verify` has to
    look; where it answers, `verify` would say the same. `verify` is a module's own function, so that a worker process
    can import it; `preload` is the module whose import brings all that it needs.
    """

    check: Callable[[str], tuple[str, str] | None]
    quick: Callable[[str, str], float | None]
    verify: Judge
    preload: str


class RewardPool(AbstractAsyncContextManager["RewardPool"]):
    """Judges responses; `async with RewardPool(...) as pool` leaves no worker behind.

    `workers` is None for one per core. Time limits, in seconds, count from when a worker takes up a response, not from
    when it is handed in.
    """

    def __init__(self, verifier: Verifier, *, timeout_s: float, workers: int | None = None) -> None:
        self._verifier, self._timeout_s = verifier, timeout_s
        self._pool = ProcessPool(
            max_workers=workers or len(os.sched_getaffinity(0)),
            initializer=_start_worker,
            initargs=(verifier.preload,),
            context=multiprocessing.get_context("forkserver"),
        )
        self._starting: asyncio.Future[None] | None = None
        self._waits: list[float] = []

    async def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        """Rewards of responses against their reference answers; None where the verifier timed out or broke."""
        pairs = zip(responses, answers, strict=True)
        return list(await asyncio.gather(*(self._score_one(*pair) for pair in pairs)))

    def queue_seconds(self) -> tuple[float, float]:
        """Mean and longest time that responses waited for a worker since the last call; zeros where none had to."""
        waits, self._waits = self._waits, []
        return (sum(waits) / len(waits), max(waits)) if waits else (0.0, 0.0)

    async def __aexit__(self, *_: object) -> None:
        """End the worker processes at once, unfinished work included."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)

    async def _score_one(self, response: str, answer: str) -> float | None:
        if (settled := self._verifier.quick(response, answer)) is not None:
            return settled
        handed_in = time.monotonic()
        if self._starting is None:  # in a thread: it waits for the forkserver's imports
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        await asyncio.shield(self._starting)
        task = (self._verifier.verify, response, answer)
        future = self._pool.schedule(_judge, args=task, timeout=self._timeout_s)
        try:
            taken_up, reward = await asyncio.wrap_future(future)
        except FutureTimeoutError:
            self._waits.append(max(0.0, time.monotonic() - self._timeout_s - handed_in))
            return None
        except ProcessExpired:
            return None
        self._waits.append(taken_up - handed_in)
        return reward

    def _start(self) -> None:
        """Start forkserver and workers."""
        multiprocessing.set_forkserver_preload([self._verifier.preload])
        self._pool.schedule(os.getpid)  # the first task starts the workers


def _start_worker(preload: str) -> None:
    """Tie a new worker's life to the parent's."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for the end of a long call in C
    parent = multiprocessing.parent_process()
    if parent is not None:  # always, in a pool's worker
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    importlib.import_module(preload)  # at once, unless the forkserver keeps what another pool preloaded


def _judge(verify: Judge, response: str, answer: str) -> tuple[float, float]:
    """When a worker took up a response, on the clock that all processes of a host share, and the reward."""
    return time.monotonic(), verify(response, answer)


def _end_with(sentinel: int) -> None:
    """End this process when the one behind the sentinel is gone, however that ended."""
    connection.wait([sentinel])
    os._exit(1)
