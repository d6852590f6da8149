"""Handles of a fork server and its workers in the process that started them. Every wait has a time limit."""

import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from areal_like.rewards.forkserver import FORK, KILL, REPORT
from areal_like.runtime.descendants import descendants, resident_bytes

START_S = 300.0  # for a fork server's imports on a busy machine; then it is replaced
END_S = 60.0  # for a killed process to end, or for a process to read or write its bytes
STOP_S = 10.0  # for a fork server to stop all of its workers
_WATCH_S = 0.25  # between two checks of a busy worker's memory


class Ended(Exception):
    """A worker ended instead of answering; `how` describes the end in words, `code` is its exit code if it has one."""

    def __init__(self, how: str, code: int | None = None) -> None:
        super().__init__(how)
        self.how, self.code = how, code


class TookTooLong(Exception):
    """A worker had not answered by its time limit, and was killed."""


class ForkServer:
    """A fork server's process, started by `forkserver.command`. Raises OSError if it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self.pid = self._process.pid

    def lives(self) -> bool:
        """Return whether its process exists; it may be suspended, or too busy to answer."""
        return self._process.poll() is None

    def fork(self) -> "RewardProcess":
        """Return a new worker; raises Ended if there is none within START_S."""
        ours, theirs = socket.socketpair()
        report, their_report = os.pipe()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)  # a suspended process reads nothing
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
        worker = RewardProcess(self, Connection(ours.detach()), Connection(report, writable=False))
        try:
            with theirs:
                socket.send_fds(self._control, [FORK], [theirs.fileno(), their_report])
        except OSError as error:
            worker.close()
            self.stop()
            raise Ended("its fork server has ended") from error
        finally:
            os.close(their_report)
        worker.begin()
        return worker

    def kill(self, worker: int) -> None:
        """Kill a worker through the fork server, whose own children's process ids cannot have been reused."""
        try:
            self._control.sendall(KILL + str(worker).encode())
        except OSError:  # the fork server has ended, and its workers with it
            return

    def stop(self) -> None:
        """Stop the fork server and all of its descendants."""
        self._control.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # it is suspended; its workers end with it
            self._process.kill()
            self._process.wait()


class RewardProcess:
    """A worker's process, which takes one call at a time."""

    def __init__(self, server: ForkServer, connection: Connection, report: Connection) -> None:
        self._server, self._connection, self._report = server, connection, report
        self._ready = select.poll()
        for each in (connection, report):
            self._ready.register(each.fileno(), select.POLLIN)
        self.pid = 0
        self.calls = 0

    def begin(self) -> None:
        """Wait for the worker's process; raises Ended."""
        try:
            self.pid = self._read_report(START_S)
            if self.pid < 0:
                raise Ended(f"it cannot be started: {os.strerror(-self.pid)}")
        except Ended:
            self.close()
            raise

    def call(self, call: bytes, limit_s: float, memory_bytes: float) -> bytes:
        """Return the answer to a call; raises Ended and TookTooLong, and then the worker's processes are gone."""
        self.calls += 1
        deadline = time.monotonic() + limit_s
        try:
            self._connection.send_bytes(call)
            while not (ready := dict(self._ready.poll(1e3 * _WATCH_S))):
                if time.monotonic() > deadline:
                    raise TookTooLong
                if (used := resident_bytes([self.pid, *descendants(self.pid)])) > memory_bytes:
                    raise Ended(
                        f"it took {used >> 20} MiB of memory; reward.memory_mb allows {int(memory_bytes) >> 20}"
                    )
            if self._connection.fileno() in ready:  # also if it has ended since it answered
                return self._connection.recv_bytes()
        except (EOFError, OSError):
            pass
        except BaseException:
            self.end()
            raise
        raise self.end()

    def end(self) -> Ended:
        """Kill the worker, and return how it ended."""
        self._server.kill(self.pid)
        try:
            code = os.waitstatus_to_exitcode(self._read_report(END_S))
            return Ended(f"exit code {code}" if code >= 0 else signal.Signals(-code).name, code)
        except Ended as unknown:
            return unknown
        finally:
            self.close()

    def close(self) -> None:
        self._connection.close()
        self._report.close()

    def _read_report(self, limit_s: float) -> int:
        """Return the next number that its fork server reports; raises Ended."""
        data = os.read(self._report.fileno(), REPORT.size) if wait([self._report], limit_s) else b""
        if not data:
            self._server.stop()  # if it has not ended, it hangs; the next worker gets a new one
            raise Ended("its fork server has ended")
        return int(REPORT.unpack(data)[0])


_TIMEVAL = struct.pack("ll", int(END_S), 0)
