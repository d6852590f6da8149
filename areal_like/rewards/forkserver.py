"""The process that reward workers are forked from: it preloads their imports and kills processes they leave behind.

It has one thread and runs no user code. Orphans of a worker, in any session, group or environment, become
children of this process and are killed once the worker has ended. When the parent process ends or closes its end of the
control socket, this process kills all its descendants and exits.

The control socket carries `fork`, with the worker's connection and a pipe that reports its process id and later how it
ended, and `kill PID`.
"""

import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from areal_like.rewards import worker
from areal_like.runtime.descendants import adopt_orphans, kill_orphans

FORK, KILL = b"fork", b"kill "
REPORT = struct.Struct("i")  # sent on a worker's pipe: its process id or -errno, then its waitpid status
_POLL_S = 1.0  # between two checks of the parent, in case a fork of the parent keeps the socket open
_END_POLL_S = 0.01


def command(preload: Sequence[str], prepare: tuple[str, str, str] | None, log: Path | None) -> list[str]:
    """Return the command that starts a fork server; its standard input is the control socket.

    `preload` lists modules; `prepare` is a module, a caching function in it, and the function's argument.
    """
    ours = {"preload": list(preload), "prepare": prepare, "log": str(log) if log else None}
    setup = {"path": sys.path, "argv": sys.argv, "ours": ours}
    return [sys.executable, "-c", _START, str(os.getpid()), json.dumps(setup)]


_START = """
import json, sys
parent, setup = int(sys.argv[1]), json.loads(sys.argv[2])
sys.path[:], sys.argv[:] = setup["path"], setup["argv"]
from areal_like.rewards.forkserver import main
main(parent, **setup["ours"])
"""


def main(parent: int, preload: Sequence[str], prepare: Sequence[str] | None, log: str | None) -> None:
    """Import and prepare, then serve until the parent is gone."""
    control = socket.socket(fileno=os.dup(0))
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to a whole run, which stops its workers first
    for name in preload:
        with suppress(Exception):  # the call that needs the module imports it again and reports the error
            importlib.import_module(name)
    if prepare:
        with suppress(Exception):
            getattr(importlib.import_module(prepare[0]), prepare[1])(prepare[2])
    server = _ForkServer(control, Path(log) if log else None)
    server.serve(parent)
    while kill_orphans(frozenset(), server.cleaners):
        time.sleep(_END_POLL_S)


class _ForkServer:
    def __init__(self, control: socket.socket, log: Path | None) -> None:
        self._control, self._log = control, log
        self._reports: dict[int, int] = {}  # of each worker, by process id
        self.cleaners: dict[int, float] = {}
        self._ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self, parent: int) -> None:
        """Serve until the parent is gone."""
        while os.getppid() == parent:
            ready, _, _ = select.select([self._control.fileno(), self._ended], [], [], _POLL_S)
            if self._ended in ready:
                os.read(self._ended, 4096)
            self._bury()
            if self._control.fileno() in ready and not self._answer():
                return

    def _bury(self) -> None:
        """Report workers that have ended, and kill their orphans: all children that are not workers."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if (report := self._reports.pop(ended[0], None)) is not None:
                    _report(report, ended[1])
                    os.close(report)
        kill_orphans(
            self._reports.keys(), self.cleaners
        )  # an exit wakes this process again, which then has its children

    def _answer(self) -> bool:
        """Execute a command of the control socket; return False if the other end is closed."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 64, 2)
        if message == FORK:
            self._fork(*descriptors)
        elif message and (pid := int(message.removeprefix(KILL))) in self._reports:
            os.kill(pid, signal.SIGKILL)
        return bool(message)

    def _fork(self, connection: int, report: int) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # out of memory or process ids
            _report(report, -(error.errno or 1))
            os.close(connection)
            os.close(report)
            return
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                for descriptor in (self._control.detach(), self._ended, report, *self._reports.values()):
                    os.close(descriptor)
                worker.main(Connection(connection), self._log, server)
            finally:
                os._exit(0)
        os.close(connection)
        self._reports[pid] = report
        _report(report, pid)


def _report(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the caller has stopped waiting
        os.write(pipe, REPORT.pack(number))
