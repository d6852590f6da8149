"""Inside a worker of a `RewardPool`: a call of user code can neither outlive its limit nor flood the run.

Time limits are faulthandler's: its thread needs no lock of Python's, so that a regular expression or a library in C
that never returns ends too, with its traceback in the log.
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

from areal_like.errors import private
from areal_like.runtime.descendants import adopt_orphans, children, die_with_parent, end_children
from areal_like.runtime.user_code import UserCodeError

TIMED_OUT = 1  # faulthandler's exit code
UNSENT = "cannot be sent to or from a worker process"
LOG_BYTES = 8 << 20  # beyond it, what calls print is lost
VARIABLE = "AREAL_LIKE_REWARD_WORKER"  # of workers, and of what they start


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
    """Give a new worker a process group and an output of its own."""
    os.setpgid(0, 0)
    adopt_orphans()  # what a call's own children start comes to this process
    multiprocessing.set_start_method("fork", force=True)  # as in a program of the user's own
    os.environ[VARIABLE] = "1"
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = _Log(log or Path(os.devnull))
    _outputs.append(sys.stderr)  # where faulthandler writes, whatever a call makes of sys.stderr


def work(call: bytes) -> bytes:
    """Return the pickled value of a call and None, or None and the error.

    `call` is pickled: what loads the function, its arguments, and the limits of loading and of the call in seconds.
    What loading has started stays for later calls, what the call has started ends here.
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
    except BaseException as raised:  # noqa: BLE001 - a user's code fails in any way it likes, as pytest.fail does
        traceback.print_exc()
        error = str(raised) if isinstance(raised, UserCodeError) else f"{type(raised).__name__}: {raised}"
        answer = bytes(ForkingPickler.dumps((None, error)))
    finally:
        if os.getpid() != worker:  # it forked, and this is the child
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()
        end_children(kept)
    return answer


def _pickle(value: Any) -> bytes:
    """Pickle a value; raise UserCodeError where it cannot be sent."""
    try:
        return bytes(ForkingPickler.dumps((value, None)))
    except Exception as error:  # a user's objects pickle, or not, in any way they like
        raise UserCodeError(f"{UNSENT}: {type(error).__name__}: {error}") from error


def _receive(call: bytes) -> tuple[Callable[[], Callable[..., Any]], Sequence[Any], float, float]:
    """Receive a call; raise UserCodeError where it has objects of modules that this process cannot import."""
    try:
        return ForkingPickler.loads(call)
    except Exception as error:  # a user's objects are made, or not, in any way they like
        raise UserCodeError(f"{UNSENT}: {type(error).__name__}: {error}") from error


def itself(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself; `work` loads this when a function is sent by name."""
    return function


class _Log(io.TextIOBase):
    """A text file that several processes append to, and that takes no more than LOG_BYTES.

    What cannot be written, as on a full disk, is lost: no reward depends on it.
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
    """End this process in `seconds`, whatever it does, and report where it was."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_outputs[0])
