"""The parent of worker processes: kills everything they start, in any session, group or environment.

Its argument is a descriptor: a packet socket to the process that started it. It is the subreaper of all workers: an
orphan below a worker becomes a child of the worker, and an orphan of a dead worker becomes a child of this process,
which kills it. When the other end of the socket is closed, for example by the death of its process, this process kills
all workers and their descendants, and exits.
"""

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from areal_like.runtime.descendants import adopt_orphans, children, kill_orphans

_MOST = 1 << 20  # bytes of a request
_POLL_S = 0.05  # during a kill
_FEW = 64  # descriptors of a worker


def main() -> None:
    """Start and kill workers on request, until the connection ends."""
    adopt_orphans()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    workers: dict[int, subprocess.Popen[bytes]] = {}
    cleaners: dict[int, float] = {}
    while not ended:
        orphans = kill_orphans({process.pid for process in workers.values()}, cleaners)
        readable, _, _ = select.select([control, woken], [], [], _POLL_S if orphans else None)
        if woken in readable:
            woken.recv(4096)
        if control in readable and not _obey(control, workers):
            break
        _report(control, workers)
    while workers or children():
        for process in workers.values():
            process.kill()
        for name in [name for name, process in workers.items() if process.poll() is not None]:
            del workers[name]
        if kill_orphans({process.pid for process in workers.values()}, cleaners) or workers:
            select.select([woken], [], [], _POLL_S)


def _obey(control: socket.socket, workers: dict[int, "subprocess.Popen[bytes]"]) -> bool:
    """Start or kill a worker; return False when the connection ends."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(control, _MOST, _FEW)
    except OSError:
        return False
    if not packet:
        return False
    request = json.loads(packet)
    try:
        if "start" in request:
            workers[request["start"]] = _start(request, descriptors)
            _tell(control, {"started": request["start"], "pid": workers[request["start"]].pid})
        elif request["kill"] in workers:
            workers[request["kill"]].kill()
    except OSError as error:
        _tell(control, {"ended": request["start"], "status": None, "why": str(error)})
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True


def _start(request: dict[str, object], descriptors: "array.array[int] | list[int]") -> "subprocess.Popen[bytes]":
    """Run a command with the numbers of its descriptors as further arguments."""
    command = [*request["command"], *map(str, descriptors)]  # type: ignore[misc]
    with open(str(request["log"]), "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=tuple(descriptors),
            start_new_session=True,
        )


def _report(control: socket.socket, workers: dict[int, "subprocess.Popen[bytes]"]) -> None:
    for name in list(workers):
        status = workers[name].poll()
        if status is not None:
            del workers[name]
            _tell(control, {"ended": name, "status": status})


def _tell(control: socket.socket, message: dict[str, object]) -> None:
    with suppress(OSError):  # the connection is closed: the next packet is its end
        control.send(json.dumps(message).encode())
