"""The main process's view of a worker process."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from areal_like.capabilities.agents.workers.frames import Frames
from areal_like.capabilities.agents.workers.marks import Marks

FAILED_S = 5.0
SUSPICIOUS = 2  # failed calls in a row


@dataclass(frozen=True)
class WorkerLimits:
    """Numbers of workers and of their event loops, and the limits that end a worker."""

    workers: int
    loops: int
    blocked_s: float
    memory_mb: int | None = None


class EndedWorker(Exception):
    """A call has ended or blocked its worker: `cause` is the counted category, the message has the details."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Interrupted(Exception):
    """Another call's code has ended the worker; with `suspect` it may have been this call's code."""

    def __init__(self, suspect: bool) -> None:
        self.suspect = suspect


@dataclass(frozen=True)
class CallStart:
    """One start of a call: the request to the worker, and the function that answers its questions (method and body)."""

    request: bytes
    answer: Callable[[str, bytes], Awaitable[bytes]]


@dataclass(eq=False)
class Call:
    """A call that a worker has."""

    number: int
    attempt: CallStart
    result: asyncio.Future[bytes]
    answers: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # in progress, by question


@dataclass(eq=False)
class Lane:
    """An event loop of a worker; `stale_s` is the current time without an iteration, `stood_still_s` their sum.

    `blocking` is the connection for questions whose thread waits for the answer.
    """

    frames: Frames = field(init=False)
    blocking: Frames = field(init=False)
    place: int | None = None  # of its thread's mark, once it runs
    beats: int = 0
    stale_s: float = 0.0
    stood_still_s: float = 0.0
    calls: dict[int, Call] = field(default_factory=dict)
    failed: deque[float] = field(default_factory=deque)  # when its latest failed calls ended

    @property
    def load(self) -> int:
        """Number of calls under way; a failed one counts for FAILED_S more.

        Calls that fail at once leave a broken worker free: without this it would get every call.
        """
        since = time.monotonic() - FAILED_S
        while self.failed and self.failed[0] < since:
            self.failed.popleft()
        return len(self.calls) + len(self.failed)


@dataclass(eq=False)
class Worker:
    """A worker process.

    `left` has cancelled calls that have not ended, with the time of the cancellation. `strays` has ended calls whose
    code still runs in a thread, with the time when this was first seen.
    """

    name: int
    alone: bool
    marks: Marks
    lanes: list[Lane] = field(default_factory=list)
    pid: int | None = None
    handle: int | None = None  # of the process, for signals
    began: float = field(default_factory=time.monotonic)
    pulse: int = 0
    pulse_stale_s: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    strays: dict[int, float] = field(default_factory=dict)
    retires: bool = False
    done: int = 0  # calls that succeeded
    failures: int = 0  # calls in a row that failed
    over: bool = False

    @property
    def ready(self) -> bool:
        """Whether all of its loops run."""
        return all(lane.place is not None for lane in self.lanes)

    @property
    def calls(self) -> dict[int, Call]:
        """Its calls under way."""
        return {number: call for lane in self.lanes for number, call in lane.calls.items()}

    @property
    def is_suspect(self) -> bool:
        """Whether its last calls failed: it gets one call at a time, FAILED_S after the last failure."""
        return self.failures >= SUSPICIOUS and any(lane.load for lane in self.lanes)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        if self.handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, number)
