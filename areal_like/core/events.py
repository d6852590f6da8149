"""Events: spans of time in lanes, noted where they are known anyway, kept by the run's record.

A lane names the component (`controller`, `actor 0`, `server 1`), a name the activity (`training`, `generating`); times
are seconds since the epoch, by a clock that never jumps. Without a log that `recording` has opened around the run,
nothing is noted.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Return the seconds since the epoch by a clock that starts as the host's and never jumps."""
    return _BEGAN + time.monotonic()


@dataclass(frozen=True)
class Event:
    """One span; `ids` name its step, version or group."""

    lane: str
    name: str
    start: float
    end: float
    ids: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class EventLog:
    """Events since the last `drain`, and each lane's open spans."""

    _events: list[Event] = field(default_factory=list)
    _under_way: dict[str, tuple[str, float]] = field(default_factory=dict)

    def note(self, lane: str, name: str, start: float, end: float, **ids: int) -> None:
        """Note that something has ended."""
        self._events.append(Event(lane, name, start, end, ids))

    def turn(self, lane: str, name: str | None) -> None:
        """Note that a lane does `name` from now on, or nothing."""
        present = now()
        if before := self._under_way.pop(lane, None):
            self.note(lane, before[0], before[1], present)
        if name is not None:
            self._under_way[lane] = (name, present)

    def drain(self) -> list[Event]:
        """Return all events so far, once; an event in progress is cut here and continues."""
        for lane, (name, _) in list(self._under_way.items()):
            self.turn(lane, name)
        events, self._events = self._events, []
        return events


_log: ContextVar[EventLog | None] = ContextVar("areal_like.core.events", default=None)


@contextmanager
def recording(log: EventLog) -> Iterator[None]:
    """Note the events of the body, and of the tasks that it starts, in `log`."""
    token = _log.set(log)
    try:
        yield
    finally:
        _log.reset(token)


@contextmanager
def span(lane: str, name: str, **ids: int) -> Iterator[None]:
    """Note the body."""
    start = now()
    try:
        yield
    finally:
        note(lane, name, start, **ids)


def note(lane: str, name: str, start: float, **ids: int) -> None:
    """Note a span that began at `start` and ends now."""
    if log := _log.get():
        log.note(lane, name, start, now(), **ids)


def turn(lane: str, name: str | None) -> None:
    """Note that a lane does `name` from now on, or nothing."""
    if log := _log.get():
        log.turn(lane, name)
