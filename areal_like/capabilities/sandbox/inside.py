"""Process 1 of a sandbox: runs commands one by one, within limits, and kills all their child processes.

It is executed as a file in the sandbox, so it imports only the standard library. Requests arrive on standard input,
replies go to standard output: a length of four bytes and JSON, then the announced bytes. When standard input ends, this
process exits, and with it the whole sandbox.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any

POLL_S = 0.05  # between two checks of memory and processes
CHUNK = 1 << 16
MB = 1 << 20
ADDRESS_SPACE = 4  # times the memory: programs reserve more than they use
MARGIN = 8  # processes beyond the limit, so that reaching it is noticed; process 1 may be among them
NICE = 10  # commands give way to this process, and to the run
USER_ID = 65534
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _FILTER = 4, 22, 2  # prctl(2)
_CLONE_NEWUSER = 0x10000000
# System calls for uncounted memory or new namespaces: audit architecture,
# clone, clone3, and unshare setns mount umount2 pivot_root keyctl add_key request_key bpf perf_event_open userfaultfd
# memfd_create memfd_secret shmget msgget io_uring_setup open_tree move_mount fsopen fsconfig fsmount
_ALIKE = (425, 428, 429, 430, 431, 432, 447)
_CALLS: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 56, 435, (272, 308, 165, 166, 155, 250, 248, 249, 321, 298, 323, 319, 29, 68)),
    "aarch64": (0xC00000B7, 220, 435, (97, 268, 40, 39, 41, 219, 217, 218, 280, 241, 282, 279, 194, 186)),
}


def main() -> None:
    """Serve requests until the input ends."""
    limits = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # commands may have the same user id
    _reply({"ready": _filter_program() is not None, "machine": platform.machine()})
    while True:
        size = struct.unpack("<I", _receive(4))[0]
        request = json.loads(_receive(size))
        stdin = _receive(request["stdin"])
        _Command(limits, request, stdin).run()


class _Command:
    """One command, until all of its processes are gone."""

    def __init__(self, limits: dict[str, Any], request: dict[str, Any], stdin: bytes) -> None:
        self._limits, self._request, self._stdin = limits, request, stdin
        self._outputs: dict[int, bytearray] = {}
        self._limit: str | None = None
        self._status: int | None = None

    def run(self) -> None:
        """Run the command, and send its outcome."""
        began = time.monotonic()
        self._start()
        deadline, look = began + self._request["timeout_s"], began
        while self._status is None and self._limit is None:
            now = time.monotonic()
            if now >= deadline:
                self._limit = "time"
            elif now >= look:
                self._limit, look = self._measure(), now + POLL_S
            if self._limit is None:
                self._poll(max(0.0, min(look, deadline) - time.monotonic()))
                self._reap()
        self._limit = self._limit or self._measure()
        _end_all()
        self._status = self._status if self._status is not None else 128 + signal.SIGKILL
        while self._open and self._limit != "output":
            self._poll(0.0)
        if self._limit is None and not os.statvfs(self._limits["work"]).f_bavail:
            self._limit = "disk"
        self._answer(time.monotonic() - began)

    def _start(self) -> None:
        pipes = [os.pipe() for _ in range(4)]
        (taken, given), (out, own_out), (err, own_err), (failed, fails) = pipes
        self._child = os.fork()
        if not self._child:
            _become(self._request["command"], self._limits, (taken, own_out, own_err), fails)
        for end in (taken, own_out, own_err, fails):
            os.close(end)
        for end in (given, out, err):
            os.set_blocking(end, False)
        self._failure, self._given = failed, given
        self._order, self._open = (out, err), {out, err}
        self._outputs = {out: bytearray(), err: bytearray()}
        self._poller = select.poll()
        self._poller.register(0, 0)  # the end of the input
        for end in (out, err):
            self._poller.register(end, select.POLLIN)
        self._exits = os.pidfd_open(self._child)
        self._poller.register(self._exits, select.POLLIN)
        self._poller.register(given, select.POLLOUT if self._stdin else 0)
        if not self._stdin:
            self._close_stdin()

    def _poll(self, wait_s: float) -> None:
        """Copy available input and output."""
        for end, _ in self._poller.poll(int(1000 * wait_s) + bool(wait_s)):
            if end in self._open:
                self._take(end)
            elif end == self._given:
                self._feed()
            elif end == 0:  # the caller has stopped waiting for the outcome
                os._exit(0)

    def _take(self, end: int) -> None:
        try:
            data = os.read(end, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._poller.unregister(end)
            self._open.discard(end)
        self._outputs[end] += data
        if len(self._outputs[end]) > self._request["output_bytes"]:
            del self._outputs[end][self._request["output_bytes"] :]
            self._limit = self._limit or "output"

    def _feed(self) -> None:
        try:
            written = os.write(self._given, self._stdin[:CHUNK])
        except BlockingIOError:
            return
        except OSError:  # the command does not read any more
            written = len(self._stdin)
        self._stdin = self._stdin[written:]
        if not self._stdin:
            self._close_stdin()

    def _close_stdin(self) -> None:
        self._poller.unregister(self._given)
        os.close(self._given)
        self._given = -1

    def _reap(self) -> None:
        """Reap children and orphans that have ended."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._child:
                    code = os.waitstatus_to_exitcode(status)
                    self._status = code if code >= 0 else 128 - code
                    if code == -signal.SIGXFSZ:
                        self._limit = "disk"

    def _measure(self) -> str | None:
        """Return the limit that the command's processes together have reached."""
        threads, kilobytes = 0, 0
        for name in os.listdir("/proc"):
            if name.isdigit() and name != "1":
                with suppress(OSError), open(f"/proc/{name}/status") as file:
                    fields = dict(line.split(":", 1) for line in file if ":" in line)
                    threads += int(fields.get("Threads", "0"))
                    kilobytes += sum(int(fields.get(key, "0").split()[0]) for key in ("RssAnon", "RssShmem"))
        if kilobytes * 1024 > self._limits["memory_mb"] * MB:
            return "memory"
        return "processes" if threads > self._limits["processes"] else None

    def _answer(self, seconds: float) -> None:
        if self._given >= 0:
            self._close_stdin()
        failure = os.read(self._failure, CHUNK).decode(errors="replace")
        for end in (*self._order, self._exits, self._failure):
            os.close(end)
        out, err = (bytes(self._outputs[end]) for end in self._order)
        about = {"status": self._status, "limit": self._limit, "seconds": seconds, "failure": failure}
        _reply(about | {"stdout": len(out), "stderr": len(err)}, out + err)


def _become(command: list[str], limits: dict[str, Any], ends: tuple[int, int, int], fails: int) -> None:
    """Execute the command in this process, within its limits and without inherited state."""
    try:
        for number, end in enumerate(ends):
            os.dup2(end, number)
        os.set_inheritable(fails, False)
        os.closerange(3, fails)
        os.closerange(fails + 1, 4096)
        _confine(limits)
    except BaseException as error:  # noqa: BLE001 - it must not return
        os.write(fails, f"{type(error).__name__}: {error}".encode())
        os._exit(126)
    try:
        os.execve(command[0], command, limits["variables"])
    except OSError as error:  # for example a missing program, or a command that is too long
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _confine(limits: dict[str, Any]) -> None:
    os.setsid()
    is_root = os.getuid() == 0
    if is_root:  # the sandbox was started by root, without a user namespace
        os.setgroups([])
        os.setresgid(USER_ID, USER_ID, USER_ID)
        os.setresuid(USER_ID, USER_ID, USER_ID)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # otherwise /proc/self belongs to root
    if is_root:
        _own_user_namespace()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(NICE)
    for what, most in (
        (resource.RLIMIT_AS, ADDRESS_SPACE * limits["memory_mb"] * MB),
        (resource.RLIMIT_NPROC, limits["processes"] + MARGIN),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * MB),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    os.umask(0o022)
    os.chdir(limits["work"])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _install_filter()


def _own_user_namespace() -> None:
    """Make RLIMIT_NPROC, which is per user and namespace, count only this command's processes."""
    try:
        os.unshare(os.CLONE_NEWUSER)
    except OSError:  # not permitted: process 1 counts the processes
        return
    for name, content in (("setgroups", "deny"), ("uid_map", ""), ("gid_map", "")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content or f"{USER_ID} {USER_ID} 1")


def _filter_program() -> bytes | None:
    """Return the filter of system calls as classic BPF, see seccomp(2); None for a machine without a table."""
    if (calls := _CALLS.get(platform.machine())) is None:
        return None
    architecture, clone, clone3, denied = calls
    load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # the machine's other numbering of system calls
    for call in (*denied, *_ALIKE):
        code += [(equal, 0, 1, call), (give, 0, 0, refuse)]
    code += [(equal, 0, 1, clone3), (give, 0, 0, missing)]  # its flags cannot be read: libraries then use clone
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 0, 1, _CLONE_NEWUSER), (give, 0, 0, refuse)]
    code += [(give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *line) for line in code)


def _install_filter() -> None:
    program = _filter_program() or b""
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(described, len(described)), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _end_all() -> None:
    """Kill every process of the sandbox except this one, and wait until all are gone."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _receive(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = os.read(0, min(size - len(data), 1 << 20))
        if not more:
            os._exit(0)
        data += more
    return bytes(data)


def _reply(about: dict[str, Any], more: bytes = b"") -> None:
    head = json.dumps(about).encode()
    data = memoryview(struct.pack("<I", len(head)) + head + more)
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
