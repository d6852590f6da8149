"""Inside a worker of a `RewardPool`: a call of someone else's function can neither outlive its limit nor flood the run.

Time limits are faulthandler's: its thread needs no lock of Python's, so that a regular expression or a library in C
that never returns ends too, with its traceback in the log.
"""

import ctypes
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from multiprocessing import connection, parent_process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from areal_like.runtime.user_code import UserCodeError

TIMED_OUT = 1  # faulthandler's exit code
UNSENT = "cannot be sent to or from a worker process"
LOG_BYTES = 8 << 20  # beyond it, what calls print is lost
_PR_SET_CHILD_SUBREAPER = 36


def start(log: Path | None) -> None:
    """Tie a new worker's life to its parent's, and give it a process group and an output of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for the end of a long call in C
    parent = parent_process()
    if parent is not None:  # always, in a pool's worker
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a call's own children start comes to this process
    # as in a program of the user's own; a forkserver of this process would end with the call that starts it
    multiprocessing.set_start_method("fork", force=True)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = _Log(log or Path(os.devnull))
    _outputs.append(sys.stderr)  # where faulthandler writes, whatever a call makes of sys.stderr


def work(call: bytes, import_limit_s: float, limit_s: float) -> tuple[int, float, Any, str | None]:
    """Process group, time at which the call was taken up, what it returned, and the error instead, if any.

    `call` is pickled: what loads the function, and its arguments. The time is of the clock that all processes of a host
    share. What loading has started stays for later calls, what the call has started ends here.
    """
    group, taken_up = os.getpid(), time.monotonic()
    value, error, kept = None, None, set[int]()
    try:
        _limit(import_limit_s)
        load, arguments = _received(call)
        function = load()
        kept = _children()
        _limit(limit_s)
        value = function(*arguments)
    except BaseException as raised:  # noqa: BLE001 - a user's code fails in any way it likes, as pytest.fail does
        traceback.print_exc()
        error = str(raised) if isinstance(raised, UserCodeError) else f"{type(raised).__name__}: {raised}"
    finally:
        if os.getpid() != group:  # it forked, and this is the child
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        _end_children(kept)
    return group, taken_up, value, error


def _received(call: bytes) -> tuple[Callable[[], Callable[..., Any]], Sequence[Any]]:
    """Raises UserCodeError where the call has objects of modules that this process cannot import."""
    try:
        return ForkingPickler.loads(call)
    except Exception as error:  # a user's objects are made, or not, in any way they like
        raise UserCodeError(f"{UNSENT}: {type(error).__name__}: {error}") from error


def itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `work` loads where a function is sent to it by name."""
    return function


class _Log(io.TextIOBase):
    """A text file that several processes append to, and that takes no more than LOG_BYTES.

    What cannot be written, as on a full disk, is lost: no reward depends on it.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError:
            path = Path(os.devnull)
        self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)

    def write(self, text: str) -> int:
        with suppress(OSError):
            if os.fstat(self._file.fileno()).st_size < LOG_BYTES:
                self._file.write(text[:LOG_BYTES])
        return len(text)

    def fileno(self) -> int:
        return self._file.fileno()


_outputs: list[io.TextIOBase] = []


def _limit(seconds: float) -> None:
    """End this process in `seconds`, whatever it does, and say where it was."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_outputs[0])


def _end_children(kept: Set[int]) -> None:
    """End what a call has started, but not `kept`; its orphans are children of this process too."""
    with suppress(ChildProcessError, ProcessLookupError):
        while children := _children() - kept:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> set[int]:
    """Process ids of this process's children."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in _numbers(file)}


def _numbers(children: Path) -> list[int]:
    """Process ids in a thread's file; none where the thread has ended meanwhile."""
    try:
        return [int(pid) for pid in children.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _end_with(sentinel: int) -> None:
    """End this process when the one behind the sentinel is gone, however that ended."""
    connection.wait([sentinel])
    os._exit(1)
