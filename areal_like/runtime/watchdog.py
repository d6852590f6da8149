"""A process that watches the event loop of the run's main process, without needing its GIL or loop.

A loop that is blocked for BLOCKED_S is reported, with the stacks of all threads in a log. A loop that is still blocked
SIGNAL_S after Ctrl-C or SIGTERM cannot end the run: the main process is killed, and the janitor cleans up.
"""

import asyncio
import faulthandler
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from areal_like.runtime.descendants import die_with_parent
from areal_like.runtime.logs import shorten_log

BLOCKED_S = 30.0
SIGNAL_S = 5.0
BEAT_S = 0.25
DUMP = signal.SIGUSR2
DUMP_S = 1.0  # for faulthandler to write
_LIBRARIES = ("/lib/python", "<")


@asynccontextmanager
async def watch_loop(log: Path, blocked_s: float = BLOCKED_S, signal_s: float = SIGNAL_S) -> AsyncIterator[None]:
    """Watch the running loop while the body runs; stacks go to `log`."""
    root = Path(__file__).parents[2]
    program = f"import sys; sys.path.insert(0, {str(root)!r}); from areal_like.runtime.watchdog import main; main()"
    beats, (heard, signals) = os.memfd_create("areal-like-beats"), os.pipe()
    os.set_blocking(signals, False)
    limits = [str(blocked_s), str(signal_s)]
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.set_wakeup_fd(signals, warn_on_full_buffer=False) if is_main else None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stacks:
        faulthandler.register(DUMP, stacks, all_threads=True)

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    program,
                    str(os.getpid()),
                    str(beats),
                    str(heard),
                    str(log),
                    *limits,
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[beats, heard],
                process_group=0,
            )

        watchdog = [start()]
        beating = asyncio.create_task(_beat(beats, watchdog, start))
        try:
            yield
        finally:
            beating.cancel()
            if before is not None:
                signal.set_wakeup_fd(before)
            os.close(signals)
            watchdog[0].kill()
            watchdog[0].wait()
            os.close(heard)  # open until now for another watchdog
            os.close(beats)
            faulthandler.unregister(DUMP)


async def _beat(
    beats: int, watchdog: list[subprocess.Popen[bytes]], start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """Count the iterations of the loop, and replace a watchdog that has ended."""
    for count in range(sys.maxsize):
        os.pwrite(beats, count.to_bytes(8), 0)
        if watchdog[0].poll() is not None:
            code = watchdog[0].returncode
            print(f"areal-like: the loop watchdog ended (exit code {code}) and was started again", file=sys.stderr)
            watchdog[0] = start()
        await asyncio.sleep(BEAT_S)


def main() -> None:
    """Watch the parent until it ends."""
    parent, beats, signals = map(int, sys.argv[1:4])
    die_with_parent(parent)
    Watch(parent, beats, Path(sys.argv[4]), *map(float, sys.argv[5:])).run(signals)


class Watch:
    """The watchdog of one process. Only time in which the watchdog itself ran counts."""

    def __init__(self, parent: int, beats: int, log: Path, blocked_s: float, signal_s: float) -> None:
        self._parent, self._beats, self._log, self._blocked_s, self._signal_s = parent, beats, log, blocked_s, signal_s
        self._count, self._stale_s, self._is_told, self._is_signalled = b"", 0.0, False, False

    def run(self, signals: int) -> None:
        """Check the beats, and read the parent's signals, which its C handler writes to `signals`."""
        last = time.monotonic()
        while True:
            if select.select([signals], [], [], BEAT_S)[0]:
                numbers = os.read(signals, 64)
                if not numbers:
                    return
                self._is_signalled |= bool({signal.SIGINT, signal.SIGTERM} & set(numbers))
            now = time.monotonic()
            self._look(min(now - last, 2 * BEAT_S))
            last = now

    def _look(self, passed_s: float) -> None:
        count = os.pread(self._beats, 8, 0)
        self._stale_s = self._stale_s + passed_s if count == self._count else 0.0
        self._count = count
        if not self._stale_s:
            self._is_told = False
        if self._is_signalled and self._stale_s > self._signal_s:
            where = self._dump()
            self._say(f"the run's main process{where} does not react to the signal, and was killed")
            os.kill(self._parent, signal.SIGKILL)
        elif self._stale_s > self._blocked_s and not self._is_told:
            self._is_told = True
            self._say(f"the run's main process has stood still for {self._blocked_s:g} s{self._dump()}")

    def _dump(self) -> str:
        """Dump the stacks; return the innermost lines outside libraries."""
        shorten_log(self._log)
        before = self._log.stat().st_size
        os.kill(self._parent, DUMP)
        time.sleep(DUMP_S)
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(before)
            lines = re.findall(r'File "([^"]*)", line (\d+)', file.read(1 << 20).decode(errors="replace"))
            own = [f"{path}:{line}" for path, line in lines if not any(part in path for part in _LIBRARIES)]
            return f" (at {own[0]}; stacks of all threads: {self._log})" if own else f" (stacks: {self._log})"
        return ""

    def _say(self, text: str) -> None:
        print(f"areal-like: {text}", file=sys.stderr, flush=True)
