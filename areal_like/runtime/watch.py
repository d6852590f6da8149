"""Whether a worker still turns, whose code stands in its way, and how large it is; read from outside of its GIL."""

import asyncio
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from areal_like.runtime.descendants import descendants, resident_bytes
from areal_like.runtime.remote import Lane, Worker
from areal_like.runtime.worker import DUMP, PULSE

SAMPLE_S = 0.5  # in which a thread that computes uses processor time
STOPPED_S = 0.5
BUSY_SHARE = 0.5  # of what the busiest thread uses
DUMP_S = 1.0  # for faulthandler to write
MB = 1 << 20
_NOT_THE_USERS = ("/lib/python", "<", "/areal_like/runtime/", "/areal_like/workflows/")


def note_beats(worker: Worker, passed_s: float) -> None:
    """Note which of a worker's loops have turned since the last time, `passed_s` ago."""
    beat = worker.marks.beat(PULSE)
    worker.pulse_stale_s = 0.0 if beat != worker.pulse else worker.pulse_stale_s + passed_s
    worker.pulse = beat
    for lane in worker.lanes:
        beat = worker.marks.beat(lane.place or 0)
        lane.stale_s = 0.0 if beat != lane.beats else lane.stale_s + passed_s
        lane.beats = beat


def stands_still(worker: Worker, blocked_s: float) -> list[Lane] | None:
    """Return the loops that have not turned for so long; [] where not one thread of the worker has; None: all do."""
    if worker.pulse_stale_s > blocked_s:
        return []
    stale = [lane for lane in worker.lanes if lane.stale_s > blocked_s]
    return stale if stale and worker.pulse_stale_s < blocked_s / 2 else None


def continue_stopped(worker: Worker) -> None:
    """Have a process go on that stands still because it was stopped, as by its own SIGSTOP."""
    if worker.pulse_stale_s > STOPPED_S and worker.pid is not None:
        try:
            state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "T":
            worker.signal(signal.SIGCONT)


async def whose(worker: Worker, stale: list[Lane]) -> tuple[set[int], set[int]]:
    """Return the calls whose code blocks, and those that it may be where that is not certain."""
    if stale:  # others turn: it is what the threads of these loops run
        running = {worker.marks.call(lane.place or 0) for lane in stale} - {0}
        return running, running or {call for lane in stale for call in lane.calls}
    marked = worker.marks.running()  # some thread keeps the GIL
    threads = {place: worker.marks.thread(place)[0] for place in marked}
    before = processor_ticks(worker.pid)
    await asyncio.sleep(SAMPLE_S)
    used = {thread: ticks - before.get(thread, 0) for thread, ticks in processor_ticks(worker.pid).items()}
    most = max(used.values(), default=0)
    if not most:  # it keeps the GIL and waits for something
        return set(), set(marked.values())
    busy = {marked[place] for place, thread in threads.items() if used.get(thread, 0) > BUSY_SHARE * most}
    return (busy if len(busy) == 1 else set()), busy  # none where it is a thread that the user's code has made


def processor_ticks(pid: int | None) -> dict[int, int]:
    """Return the processor time that each thread of a process has used, by the kernel's thread id."""
    ticks = {}
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            values = file.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        ticks[int(file.parent.name)] = int(values[11]) + int(values[12])
    return ticks


def kill_large_descendants(pid: int, limit_mb: int) -> str:
    """Kill the processes below a worker that have more memory than it may have; returns what they were."""
    killed = []
    for process in descendants(pid):
        if (size := resident_bytes([process]) / MB) > limit_mb:
            try:
                name = Path(f"/proc/{process}/comm").read_text().strip()
                os.kill(process, signal.SIGKILL)
            except OSError:
                continue
            killed.append(f"{name} with {size:.0f} MB")
    return ", ".join(killed)


async def dumped(worker: Worker, calls: Iterable[int], log: Path) -> str:
    """Have the stacks of all threads written to the log; returns the line where one of the calls stands, or ""."""
    before = log.stat().st_size if log.exists() else 0
    worker.signal(DUMP)
    text = ""
    for _ in range(int(DUMP_S / 0.1)):
        await asyncio.sleep(0.1)
        with log.open("rb") as file:
            file.seek(before)
            written = file.read(MB).decode(errors="replace")
        if written and written == text:
            break
        text = written
    running = worker.marks.running()
    threads = [worker.marks.thread(place)[1] for place, call in running.items() if call in set(calls)]
    return next((f" at {line}" for thread in threads if (line := user_line(text, thread))), "")


def user_line(dump: str, thread: int) -> str:
    """Return the innermost line of a thread in faulthandler's output that is not a library's."""
    _, found, stack = dump.partition(f"hread 0x{thread:016x} ")
    stack = re.split(r"\n\n|\n(?:Current t|T)hread 0x", stack)[0] if found else ""
    for file, line in re.findall(r'File "([^"]*)", line (\d+)', stack):
        if not any(part in file for part in _NOT_THE_USERS):
            return f"{file}:{line}"
    return ""


def described(status: int | None) -> str:
    """Return how a process ended, in words."""
    if status is None:
        return "it could not be started"
    return f"exit code {status}" if status >= 0 else signal.Signals(-status).name
