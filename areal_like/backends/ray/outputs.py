"""Output of failed processes on hosts whose files the controller cannot read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from areal_like.backends.ray.workers import WorkerGroup
from areal_like.core.errors import WorkerError

ANSWER_S = 30.0  # for a node to read the end of a file


async def add_outputs(error: BaseException, caretakers: WorkerGroup) -> None:
    """Add the last output lines of each failed process to its error, read on the process's node."""
    for failure in _failures(error):
        if not failure.log_file.exists():
            found = await asyncio.gather(
                *(_last_lines(caretakers.only(rank), failure) for rank, _ in enumerate(caretakers.members))
            )
            for note in filter(None, found):
                failure.add_note(note)


async def _last_lines(caretaker: WorkerGroup, failure: WorkerError) -> str:
    with suppress(WorkerError):  # the node is lost
        lines = await caretaker.call_one(0, "last_lines", failure.log_file, phase="reading output", timeout=ANSWER_S)
        if lines:
            return f"the end of {failure.log_file} on host {caretaker.members[0].host}:\n  " + "\n  ".join(lines)
    return ""


def _failures(error: BaseException) -> Iterator[WorkerError]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _failures(each)
    elif isinstance(error, WorkerError):
        yield error
