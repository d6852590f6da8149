"""The code inside a worker of a `RewardPool`: user code can neither exceed its time limit nor flood the run's log.

faulthandler enforces the time limits: its thread needs no Python lock, so it also ends a regular expression or a C
library that never returns, with a traceback in the log.
"""

import faulthandler
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from areal_like.core.errors import private
from areal_like.core.user_code import UserCodeError
from areal_like.runtime.descendants import adopt_orphans, children, die_with_parent, end_children

TIMED_OUT = 1  # faulthandler's exit code
UNSENT = "cannot be sent to or from a worker process"
LOG_BYTES = 8 << 20  # output of calls beyond this size is discarded
VARIABLE = "AREAL_LIKE_REWARD_WORKER"  # set in workers and their child processes


def main(connection: Connection, log: Path | None, parent: int) -> None:
    """Answer calls until the other end is closed."""
    die_with_parent(parent)
    _start(log)
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(work(call))


def _start(log: Path | None) -> None:
    """Give a new worker its own process group and output."""
    os.setpgid(0, 0)
    adopt_orphans()  # this process adopts orphaned grandchildren of a call
    multiprocessing.set_start_method("fork", force=True)  # as in a user's own program
    os.environ[VARIABLE] = "1"
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = _Log(log or Path(os.devnull))
    _outputs.append(sys.stderr)  # faulthandler writes here, even if a call replaces sys.stderr


def work(call: bytes) -> bytes:
    """Return the pickled value of a call and None, or None and the error.

    `call` is pickled: a loader of the function, the arguments, and the time limits of loading and of the call in
    seconds. Processes started while loading stay for later calls; processes started by the call are killed at its end.
    """
    worker = os.getpid()
    kept = children()
    try:
        load, arguments, import_limit_s, limit_s = _receive(call)
        _limit(import_limit_s)
        function = load()
        kept = children()
        _limit(limit_s)
        answer = _pickle(function(*arguments))
    except BaseException as raised:  # noqa: BLE001 - user code may raise anything, as pytest.fail does
        traceback.print_exc()
        error = str(raised) if isinstance(raised, UserCodeError) else f"{type(raised).__name__}: {raised}"
        answer = bytes(ForkingPickler.dumps((None, error)))
    finally:
        if os.getpid() != worker:  # the call forked, and this is the child
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        end_children(kept)
    return answer


def _pickle(value: Any) -> bytes:
    """Pickle a value; raise UserCodeError if it cannot be sent."""
    try:
        return bytes(ForkingPickler.dumps((value, None)))
    except Exception as error:  # pickling a user's objects may raise anything
        raise UserCodeError(f"{UNSENT}: {type(error).__name__}: {error}") from error


def _receive(call: bytes) -> tuple[Callable[[], Callable[..., Any]], Sequence[Any], float, float]:
    """Unpickle a call; raise UserCodeError if it needs modules that this process cannot import."""
    try:
        return ForkingPickler.loads(call)
    except Exception as error:  # creating a user's objects may raise anything
        raise UserCodeError(f"{UNSENT}: {type(error).__name__}: {error}") from error


def itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself; `work` loads this when a function is sent by name."""
    return function


class _Log(io.TextIOBase):
    """A text file of at most LOG_BYTES that several processes append to.

    Output that cannot be written, for example on a full disk, is discarded, because no reward depends on it.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
        except OSError:
            path = Path(os.devnull)
        self._file = open(path, "a", encoding="utf-8", errors="replace", buffering=1, opener=private)  # noqa: SIM115

    def write(self, text: str) -> int:
        with suppress(OSError):
            if os.fstat(self._file.fileno()).st_size < LOG_BYTES:
                self._file.write(text[:LOG_BYTES])
        return len(text)

    def fileno(self) -> int:
        return self._file.fileno()


_outputs: list[io.TextIOBase] = []


def _limit(seconds: float) -> None:
    """End this process after `seconds` in any case, with a traceback."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_outputs[0])
