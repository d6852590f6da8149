"""Checks of workers that do not need their GIL: blocked event loops, the responsible calls, and memory."""

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from areal_like.capabilities.agents.workers.remote import Lane, Worker
from areal_like.capabilities.agents.workers.worker import DUMP, PULSE
from areal_like.capabilities.agents.workers.workers import Workers
from areal_like.runtime.descendants import descendants, resident_bytes
from areal_like.runtime.logs import shorten_log

START_S = 300.0  # for a worker to import its code
TICK_S = 0.1
LEFT_S = 30.0  # for the code of an ended call to stop
SAMPLE_S = 0.5  # during which a computing thread uses processor time
STOPPED_S = 0.5  # without an iteration: the loop is blocked
BUSY_SHARE = 0.5  # share of the busiest thread's processor time
DUMP_S = 1.0  # for faulthandler to write
MB = 1 << 20
_NOT_THE_USERS = ("/lib/python", "<", "/areal_like/core/", "/areal_like/capabilities/")


async def watch(workers: Workers) -> None:
    """Check every worker at intervals; only time when this process itself ran counts."""
    last = time.monotonic()
    for ticks in itertools.count():
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        passed, last = min(now - last, 2 * TICK_S), now
        for worker in list(workers.all):
            if not worker.ready:
                if now - worker.began > START_S and not worker.over:
                    workers.note_end(worker, None, f"not ready after {START_S:g} s")
                continue
            note_beats(worker, passed)
            await _judge(workers, worker, descendants=ticks % 10 == 0)
        shorten_log(workers.log)


async def _judge(workers: Workers, worker: Worker, *, descendants: bool) -> None:
    if workers.limits.memory_mb is not None and worker.pid is not None:
        _judge_memory(workers, worker, worker.pid, workers.limits.memory_mb, descendants=descendants)
    continue_stopped(worker)
    if not worker.over and (stale := stands_still(worker, workers.limits.blocked_s)) is not None:
        await _find_blocked(workers, worker, stale)
    if worker.over:
        return
    now, calls = time.monotonic(), worker.calls
    running = {call for call in worker.marks.running().values() if call not in calls}
    worker.strays = {call: worker.strays.get(call, now) for call in running}
    if any(now - since > LEFT_S for since in [*worker.left.values(), *worker.strays.values()]):
        workers.retire(worker)


def _judge_memory(workers: Workers, worker: Worker, pid: int, limit_mb: int, *, descendants: bool) -> None:
    if resident_bytes([pid]) > limit_mb * MB:
        marked = set(worker.marks.running().values())
        message = f"its process has more than {limit_mb} MB (episode.memory_mb)"
        workers.fault(worker, "memory", message, marked if len(marked) == 1 else set(), marked)
    elif descendants and (killed := kill_large_descendants(pid, limit_mb)):
        workers.say(f"a program that a workflow has started was killed: {killed} (episode.memory_mb: {limit_mb})")


async def _find_blocked(workers: Workers, worker: Worker, stale: list[Lane]) -> None:
    """Find the call that blocks, dump the stacks, and replace the worker."""
    guilty, suspects = await whose(worker, stale)
    where = await dump_stacks(worker, guilty, workers.log)
    message = f"it blocked its event loop for more than {workers.limits.blocked_s:g} s (episode.blocked_s){where}"
    workers.fault(worker, "blocked", message, guilty, suspects)


def note_beats(worker: Worker, passed_s: float) -> None:
    """Record which of a worker's loops have iterated since the last check, `passed_s` ago."""
    beat = worker.marks.beat(PULSE)
    worker.pulse_stale_s = 0.0 if beat != worker.pulse else worker.pulse_stale_s + passed_s
    worker.pulse = beat
    for lane in worker.lanes:
        beat = worker.marks.beat(lane.place or 0)
        lane.stale_s = 0.0 if beat != lane.beats else lane.stale_s + passed_s
        lane.stood_still_s += passed_s if lane.stale_s > STOPPED_S else 0.0
        lane.beats = beat


def stands_still(worker: Worker, blocked_s: float) -> list[Lane] | None:
    """Return the loops blocked for `blocked_s`; [] if no thread of the worker runs; None if all loops iterate."""
    if worker.pulse_stale_s > blocked_s:
        return []
    stale = [lane for lane in worker.lanes if lane.stale_s > blocked_s]
    return stale if stale and worker.pulse_stale_s < blocked_s / 2 else None


def continue_stopped(worker: Worker) -> None:
    """Continue a process that was stopped, for example by its own SIGSTOP."""
    if worker.pulse_stale_s > STOPPED_S and worker.pid is not None:
        try:
            state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "T":
            worker.signal(signal.SIGCONT)


async def whose(worker: Worker, stale: list[Lane]) -> tuple[set[int], set[int]]:
    """Return the calls whose code blocks, and the suspects if that is not certain."""
    if stale:  # other loops iterate: the calls in the threads of these loops block
        running = {worker.marks.call(lane.place or 0) for lane in stale} - {0}
        return running, running or {call for lane in stale for call in lane.calls}
    marked = worker.marks.running()  # some thread holds the GIL
    threads = {place: worker.marks.thread(place)[0] for place in marked}
    before = processor_ticks(worker.pid)
    await asyncio.sleep(SAMPLE_S)
    used = {thread: ticks - before.get(thread, 0) for thread, ticks in processor_ticks(worker.pid).items()}
    most = max(used.values(), default=0)
    if not most:  # it holds the GIL and waits
        return set(), set(marked.values())
    busy = {marked[place] for place, thread in threads.items() if used.get(thread, 0) > BUSY_SHARE * most}
    return (busy if len(busy) == 1 else set()), busy  # none if it is a thread created by user code


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
    """Kill descendants of a worker that exceed its memory limit; return their description."""
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


async def dump_stacks(worker: Worker, calls: Iterable[int], log: Path) -> str:
    """Dump the stacks of all threads to the log; return the current line of one of the calls, or ""."""
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
    """Return a thread's innermost line outside libraries in faulthandler's output."""
    _, found, stack = dump.partition(f"hread 0x{thread:016x} ")
    stack = re.split(r"\n\n|\n(?:Current t|T)hread 0x", stack)[0] if found else ""
    for file, line in re.findall(r'File "([^"]*)", line (\d+)', stack):
        if not any(part in file for part in _NOT_THE_USERS):
            return f"{file}:{line}"
    return ""
