"""Measure the cost of the controller's bookkeeping per event, without servers: admission and dispatch.

    python -m benchmarks.bookkeeping [--in-flight 1000 --in-flight 10000 --in-flight 100000] [--servers 512]

`--in-flight` groups wait for training, and as many samples wait for one of 512 servers, with as many samples in flight.
A group event is the end of a group, a request for a batch, and the start of a new group. A sample event is the end of a
sample, the dispatch of the next one, and the arrival of another. `benchmarks.controller` reports these figures too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.dispatch import Dispatch, PrefixAffinity, QueueEntry

BATCH, EVENTS = 512, 20_000


def main(
    in_flight: Annotated[list[int], typer.Option()] = [1000, 10_000, 100_000],  # noqa: B006
    servers: int = 512,
) -> None:
    for n in in_flight:
        print(asyncio.run(bookkeeping(n, servers)), flush=True)


async def bookkeeping(in_flight: int, servers: int) -> dict[str, float]:
    """Cost per event and longest call, in microseconds and milliseconds, with so many groups and samples waiting."""
    groups, longest_group = _timed(_end_groups(in_flight))
    samples, longest_sample = _timed(_end_samples(in_flight, servers))
    return {
        "in_flight": in_flight,
        "servers": servers,
        "us_per_group": round(1e6 * groups, 2),
        "us_per_sample": round(1e6 * samples, 2),
        "longest_call_ms": round(1e3 * max(longest_group, longest_sample), 2),
    }


def _timed(events: Iterator[Callable[[], object]]) -> tuple[float, float]:
    """CPU seconds per event, and of the longest."""
    total = longest = 0.0
    for event in events:
        begun = time.thread_time()
        event()
        seconds = time.thread_time() - begun
        total, longest = total + seconds, max(longest, seconds)
    return total / EVENTS, longest


def _end_groups(waiting: int) -> Iterator[Callable[[], object]]:
    """Groups end in any order, so that batches wait for old ones."""
    rng = random.Random(0)
    batch = min(BATCH, waiting // 2)
    admission = Admission(batch, max_staleness=waiting // batch)
    running: list[int] = []
    started = 0

    def fill() -> None:
        nonlocal started
        while admission.capacity and len(running) < waiting:
            admission.start(started)
            running.append(started)
            started += 1

    def end() -> None:
        running[place], running[-1] = running[-1], running[place]
        admission.finish(running.pop())
        if admission.take():
            admission.publish(admission.published + 1)
        fill()

    fill()
    for _ in range(EVENTS):
        place = rng.randrange(len(running))
        yield end


def _end_samples(waiting: int, servers: int) -> Iterator[Callable[[], object]]:
    rng = random.Random(0)
    dispatch, arrived, in_flight = Dispatch(), 0, []
    for _ in range(servers):
        state = dispatch.join(None)  # type: ignore[arg-type]
        state.capacity = state.most = max(1, waiting // servers)
        dispatch.update(state)

    def wait() -> None:
        nonlocal arrived
        if not arrived % 16:
            affinity.append(PrefixAffinity())
        arrived += 1
        dispatch.wait(QueueEntry(asyncio.Future(), affinity[-1]), priority=arrived // 16)

    affinity: list[PrefixAffinity] = []
    while len(in_flight) < servers * max(1, waiting // servers):
        wait()
        in_flight.append(dispatch.next())
    for _ in range(waiting):
        wait()

    def end() -> None:
        state = in_flight[place]
        assert state is not None
        dispatch.release(state)
        in_flight[place] = dispatch.next()
        wait()

    for _ in range(EVENTS):
        place = rng.randrange(len(in_flight))
        yield end


if __name__ == "__main__":
    typer.run(main)
