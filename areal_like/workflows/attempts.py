"""Requests that a client sends again, and answers that no client has read.

A client marks a request as a repetition: it has the `Idempotency-Key` of an equal earlier one, or a count of
retries (`X-Stainless-Retry-Count`, which the clients of OpenAI and Anthropic send). A repetition gets the answer of the
attempt before, finished or not, unless that was aborted because nobody waited for it any more. Without either sign an
equal request is a further sample, except that an answer which is known to be unread is given first.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_like.workflows.progress import Progress


class Answer(Protocol):
    """Answer to a request; `delivered` is False where no client has read it."""

    delivered: bool | None


@dataclass(frozen=True)
class Sending:
    """Sign by which a client sent a request: under which key, and how many times it had sent it before."""

    key: str = ""
    retries: int = 0


ONCE = Sending()


def sending(headers: Mapping[str, str]) -> Sending:
    """Return the marks of repetition in the headers of a request."""
    retries = headers.get("x-stainless-retry-count", "")
    return Sending(headers.get("idempotency-key", ""), int(retries) if retries.isdecimal() else 0)


@dataclass(eq=False)
class Attempt[Turn: Answer]:
    """A request that is or was answered; `readers` connections wait for it, the last of which aborts it by leaving.

    `number` is its place among the attempts of its session. `progress` has the tokens so far, if they are streamed.
    """

    number: int
    request: object
    sent: Sending
    task: asyncio.Task[Turn]
    progress: Progress | None = None
    readers: int = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count as a reader while the body runs."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            if not self.readers:
                self.task.cancel()

    async def turn(self) -> Turn:
        """Return the turn once it is complete; raises what its generation raises."""
        with self.reading():
            return await asyncio.shield(self.task)

    @property
    def is_unread(self) -> bool:
        """Whether its answer is known to have reached no client."""
        return _is_answered(self.task) and self.task.result().delivered is False

    @property
    def is_here(self) -> bool:
        """Whether it can be awaited in the running event loop, and has not failed."""
        return _is_answered(self.task) or (not self.task.done() and self.task.get_loop() is asyncio.get_running_loop())


@dataclass(eq=False)
class Attempts[Turn: Answer]:
    """The attempts of one session."""

    _all: list[Attempt[Turn]] = field(default_factory=list)

    def begin(
        self, request: object, sent: Sending, answering: Coroutine[Any, Any, Turn], progress: Progress | None = None
    ) -> Attempt[Turn]:
        """Start to answer a request."""
        attempt = Attempt(len(self._all), request, sent, asyncio.ensure_future(answering), progress)
        attempt.task.add_done_callback(_retrieve)
        self._all.append(attempt)
        return attempt

    def find_repeated(self, request: object, sent: Sending) -> Attempt[Turn] | None:
        """Return the attempt whose answer a request gets, None where it gets one of its own."""
        if not (sent.key or sent.retries or any(attempt.is_unread for attempt in self._all)):
            return None
        same = [attempt for attempt in reversed(self._all) if attempt.request == request]
        if sent.key:
            found = next((attempt for attempt in same if attempt.sent.key == sent.key), None)
        else:
            found = self._find_retried(same, sent.retries) if sent.retries else None
        if found is not None and found.is_here:
            return found
        return None if found else next((attempt for attempt in same if attempt.is_unread), None)

    def _find_retried(self, same: list[Attempt[Turn]], retries: int) -> Attempt[Turn] | None:
        """Return the attempt that a retry repeats: each is repeated once by the first retry, once by the second, ...

        One that was aborted comes first, then one that is unread, then what the retry before has repeated, the latest.
        """

        def rank(attempt: Attempt[Turn]) -> tuple[bool, bool, int]:
            return not attempt.task.cancelled(), not attempt.is_unread, -attempt.sent.retries

        found = min((attempt for attempt in same if attempt.sent.retries < retries), key=rank, default=None)
        if found is not None:
            found.sent = Sending(found.sent.key, retries)
        return found

    def answer(self, number: int) -> Turn | None:
        """Return the answer of an attempt by its number; None where there is none, or it is not complete."""
        task = self._all[number].task if number < len(self._all) else None
        return task.result() if task is not None and _is_answered(task) else None

    def answers(self) -> list[tuple[object, Turn]]:
        """Return each request that has an answer, and that, in the order in which they arrived."""
        return [(each.request, each.task.result()) for each in self._all if _is_answered(each.task)]

    @property
    def aborted(self) -> int:
        """Number of requests that were aborted because no client waited for them."""
        return sum(attempt.task.cancelled() for attempt in self._all)

    def abort(self) -> None:
        """Break off what is not answered: the episode is over. May be called from any thread."""
        for attempt in self._all:
            if not attempt.task.done() and not (loop := attempt.task.get_loop()).is_closed():
                loop.call_soon_threadsafe(attempt.task.cancel)


def _is_answered(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take note of an exception, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()
