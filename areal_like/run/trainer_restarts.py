"""Restarts the trainer of a run when ranks of it are lost, from the last checkpoint; the servers stay as they are."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from areal_like.backends.ray.heartbeat import wait_for_silence
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.core.errors import CheckpointError, RunError, WorkerError
from areal_like.run.supervisor import HOUR_S, first_line

ANSWER_S = 5.0  # that each rank has after a failure to answer; a dead one is known sooner
SILENCE = 1.5  # times `cluster.host_timeout_s`: until a lost host has been silent for that long


@dataclass(eq=False)
class StartedTrainer:
    """A started trainer: the ranks of all roles, the URL at which each host answers, and its training.

    `settle` returns when the attempt no longer writes to the run's directory.
    """

    groups: Sequence[WorkerGroup]
    beats: dict[str, str]
    train: Callable[[], Awaitable[None]]
    settle: Callable[[], Awaitable[None]]


@dataclass(eq=False)
class Budget:
    """The restarts of a trainer: at most `most` within an hour (`recover.restarts_per_hour`)."""

    most: int
    clock: Callable[[], float] = time.monotonic
    _times: deque[float] = field(default_factory=deque)

    def spend(self) -> bool:
        """Count a restart, or return False where it would be one too many."""
        while self._times and self.clock() - self._times[0] >= HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(self.clock())
        return True


async def train_to_the_end(
    attempt: StartedTrainer,
    restart: Callable[[WorkerError], Awaitable[StartedTrainer]],
    most: int,
    host_timeout_s: float | None,
    say: Callable[[str], None],
) -> None:
    """Train; when trainer ranks are lost, `restart` and train on, at most `most` times within an hour.

    A failure of another kind ends the run, and so does the loss of ranks that `restart` cannot make good.
    """
    budget = Budget(most)
    while True:
        try:
            async with hosts_watched(attempt, host_timeout_s):
                await attempt.train()
            return
        except (RunError, ExceptionGroup) as failure:
            lost = await find_lost(failure, attempt, host_timeout_s) if most else None
            if lost is None or not budget.spend():
                raise
        await attempt.settle()
        attempt = await _restart(lost, restart, budget, say)


async def _restart(
    lost: WorkerError,
    restart: Callable[[WorkerError], Awaitable[StartedTrainer]],
    budget: Budget,
    say: Callable[[str], None],
) -> StartedTrainer:
    """Return the next attempt; ranks that are lost while they start are started again, as often as allowed."""
    while True:
        limit = f"recover.restarts_per_hour={budget.most}"
        say(
            f"{lost.role} rank {lost.rank}: {first_line(lost)}. The trainer restarts from the last checkpoint ({limit})."
        )
        try:
            return await restart(lost)
        except CheckpointError as error:
            lost.add_note(str(error))
            raise lost from error
        except (WorkerError, ExceptionGroup) as failure:
            again = next((leaf for leaf in _leaves(failure) if isinstance(leaf, WorkerError)), None)
            if again is None or again.remote_traceback or not budget.spend():
                raise
            lost = again


@asynccontextmanager
async def hosts_watched(attempt: StartedTrainer, host_timeout_s: float | None) -> AsyncIterator[None]:
    """Raise WorkerError in an ExceptionGroup when a host of the trainer is silent while the body runs."""
    async with asyncio.TaskGroup() as tasks:
        watching = [] if host_timeout_s is None else [tasks.create_task(_watch_hosts(attempt, host_timeout_s))]
        yield
        for task in watching:
            task.cancel()


async def find_lost(
    failure: RunError | ExceptionGroup, attempt: StartedTrainer, host_timeout_s: float | None
) -> WorkerError | None:
    """Return the loss of a trainer rank that explains a failure; None where all ranks are there.

    The neighbours of a lost rank often fail first, so ranks and hosts are asked.
    """
    roles = {group.role for group in attempt.groups}
    for leaf in _leaves(failure):
        if isinstance(leaf, WorkerError) and leaf.role in roles and not leaf.remote_traceback:
            return leaf
    limit_s = ANSWER_S if host_timeout_s is None else max(ANSWER_S, SILENCE * host_timeout_s)
    asking = [asyncio.create_task(_ask(group, limit_s)) for group in attempt.groups]
    if host_timeout_s is not None:
        asking.append(asyncio.create_task(_ask_hosts(attempt, host_timeout_s, limit_s)))
    try:
        for answer in asyncio.as_completed(asking):
            if lost := await answer:
                return lost
        return None
    finally:
        for task in asking:
            task.cancel()


async def _ask(group: WorkerGroup, limit_s: float) -> WorkerError | None:
    """Return the death of a rank, None if there is none within the limit: a rank that waits for others is not lost."""
    try:
        async with asyncio.timeout(limit_s):
            await group.call_all("is_there", phase="training", timeout=2 * limit_s)
    except TimeoutError:
        return None
    except WorkerError as error:
        return None if error.remote_traceback else error
    return None


async def _ask_hosts(attempt: StartedTrainer, host_timeout_s: float, limit_s: float) -> WorkerError | None:
    try:
        async with asyncio.timeout(limit_s):
            await _watch_hosts(attempt, host_timeout_s)
    except TimeoutError:
        return None
    except ExceptionGroup as group:
        return next((leaf for leaf in _leaves(group) if isinstance(leaf, WorkerError)), None)
    return None


async def _watch_hosts(attempt: StartedTrainer, host_timeout_s: float) -> None:
    """Raise WorkerError, in an ExceptionGroup, for the first host that is silent for too long."""

    async def watch(host: str, url: str) -> None:
        await wait_for_silence(url, host_timeout_s)
        group, member = next((group, each) for group in attempt.groups for each in group.members if each.host == host)
        cause = f"host {host} did not answer for {host_timeout_s:g} s (cluster.host_timeout_s)"
        raise WorkerError(group.role, member.rank, "training", cause, member.log_file)

    async with asyncio.TaskGroup() as tasks:
        for host, url in attempt.beats.items():
            tasks.create_task(watch(host, url))


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    if isinstance(failure, BaseExceptionGroup):
        for each in failure.exceptions:
            yield from _leaves(each)
    else:
        yield failure
