"""Clean-up of everything that a run leaves on a host: processes, ports, temporary files."""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from areal_like.backends.ray import bound, janitor
from areal_like.backends.ray.head import accept, wait_for_loss
from areal_like.backends.ray.janitor import RUN_VARIABLE, member_file
from areal_like.backends.ray.lineage import Identity, identity, lives, ticks_now
from areal_like.core.errors import private
from areal_like.runtime.descendants import adopt_orphans, children
from areal_like.runtime.ports import PORTS_VARIABLE

SLOW_JANITOR_S = 10.0
JANITOR_LIMIT_S = janitor.LIMIT_S + 240  # on a busy machine or a slow file system; then the janitor continues alone
PACKAGE_ROOT = Path(__file__).parents[3]
# Number and value of glibc's options (mallopt(3)): by default it returns the memory of every large tensor to the system
# and allocates it again, with a page fault for each 4 KiB.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30), "MALLOC_MMAP_THRESHOLD_": (-3, 256 << 20)}
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"  # gloo reads it whenever a process group is created
LAST_LINES, LAST_BYTES = 15, 16384  # of a failed process's output, in its error
RETURN_S = 25.0  # for lost keepers to return; afterwards Ray has given up a node that was cut off
LONGEST_TMP = 24  # characters; Ray and SGLang put Unix sockets below it, whose paths have at most 107


@contextmanager
def run_lifetime(
    run_id: str, *shared_dirs: Path, lock: int | None = None, adopts: bool = True, ports: str | None = None
) -> Iterator[Path]:
    """Give the run a temporary directory, and a janitor that outlives this process.

    Every process started inside is a member of the run. When the block or this process ends, for any reason, the
    janitor ends the remaining members and removes the directory, within 10 seconds or while this process waits. Every
    host's janitor also removes `shared_dirs`, absolute paths; the last one does so when no process writes there any
    more. The janitor keeps the descriptor `lock` open while it lives. Without `adopts` this process does not become the
    parent of orphans, nor of its janitor. Sockets with any free port use one of the range `ports`.
    """
    directory = temporary_directory(run_id)
    directory.mkdir(mode=0o700, exist_ok=True)
    variables = _variables(run_id) | ({PORTS_VARIABLE: ports} if ports else {})
    before = {name: os.environ.get(name) for name in variables}
    others = children()
    adopts = adopts and not others  # their orphans would look like the run's
    if adopts:
        adopt_orphans()
    # the janitor of one node is not a member that another janitor may end
    environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", janitor.__name__, run_id, ",".join(map(str, others)), directory, *shared_dirs],
        env={**environment, "PYTHONPATH": str(PACKAGE_ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        pass_fds=[] if lock is None else [lock],
    )
    _enter(variables)
    _joined[directory] = identity(os.getpid())
    try:
        yield directory
    finally:
        del _joined[directory]
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        with ignore_interrupts():
            _wait_for(keeper, directory)
        if adopts:
            adopt_orphans(False)


def _wait_for(keeper: subprocess.Popen[bytes], directory: Path) -> None:
    """Wait for the janitor, and report if it exceeds its limits."""
    with suppress(OSError):  # the janitor is gone
        os.write(keeper.stdin.fileno(), b"%d\n" % ticks_now())  # type: ignore[union-attr]
    for limit_s, what in ((SLOW_JANITOR_S, "still busy; waiting for it"), (JANITOR_LIMIT_S, "left to end by itself")):
        try:
            janitor_id, _ = keeper.communicate(timeout=limit_s)
            with suppress(ChildProcessError, ValueError):  # it is not this process's child, or never started
                os.waitpid(int(janitor_id), 0)
            return
        except subprocess.TimeoutExpired:
            print(f"areal-like: the clean-up of {directory} is {what} (process {keeper.pid})", file=sys.stderr)


def temporary_directory(run_id: str) -> Path:
    """Return the run's directory for temporary files on each host; a short path, because it contains sockets."""
    root = tempfile.gettempdir()
    return Path(root if len(root) <= LONGEST_TMP else "/tmp") / f"areal-{run_id}"


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C during short work that must be finished; has an effect in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Caretaker:
    """An actor that holds `run_lifetime` on a node of an existing cluster, where the run's process may not be.

    It ends the run there when it does not reach the `keepers`, URLs, for `head.LOST_S` seconds.
    """

    def __init__(self, run_id: str, shared_dir: Path, keepers: Sequence[str]) -> None:
        self._run = run_id, shared_dir
        self._lifetime = ExitStack()
        self._open()
        threading.Thread(target=self._watch, args=(keepers,), daemon=True).start()

    def last_lines(self, file: Path) -> list[str]:
        """Return the last lines of a file on this node, [] if it is missing."""
        with suppress(OSError), file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - LAST_BYTES))
            return [line for line in opened.read().decode(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
        return []

    def apply(self, function: Callable[[list[int]], Any]) -> Any:
        """Return `function` of the ids of the run's Ray workers on this node, this one included."""
        joined = janitor.find_workers(temporary_directory(self._run[0]))
        return function([os.getpid(), *(pid for pid, started in joined if lives((pid, started)))])

    def close(self) -> None:
        """Remove the run's leftovers on this node; returns when they are gone."""
        self._lifetime.close()

    def close_and_exit(self) -> None:
        """Remove the run's leftovers on this node, then end this process, because Ray would not."""
        self.close()
        os._exit(0)

    def _open(self) -> None:
        self._lifetime.enter_context(run_lifetime(*self._run, adopts=False))

    def _watch(self, keepers: Sequence[str]) -> None:
        """End the run on this node when keepers are lost; if they return soon, Ray may start processes here again."""
        while True:
            asyncio.run(wait_for_loss(keepers))
            self.close()
            if not asyncio.run(accept(keepers, RETURN_S)):
                os._exit(0)
            self._open()


def join_run(run_id: str) -> None:
    """Make future children of this process members of the run; this process may be a member already."""
    if os.environ.get(RUN_VARIABLE) != run_id:
        _enter(_variables(run_id))


def end_with_run(run_id: str) -> None:
    """Ask this host's janitor of the run, if any, to end this process and its descendants.

    If this process ends before the run, its descendants end within a second.
    """
    adopt_orphans()
    directory = temporary_directory(run_id)
    _joined[directory] = identity(os.getpid())
    with suppress(OSError):
        member_file(directory, is_worker=True).touch()


def _join_again() -> None:
    """Register this fork of a member as a member of its own, immediately, because the member may be killed."""
    for directory, member in _joined.items():
        with suppress(OSError):
            member_file(directory, is_worker=False).touch()
        if not lives(member):  # the janitor may have finished
            os._exit(1)


_joined: dict[Path, Identity] = {}  # by temporary directory of each run that this process or its parent has joined
os.register_at_fork(after_in_child=_join_again)


def _variables(run_id: str) -> dict[str, str]:
    """Return the environment of every process of a run; variables set by the user take precedence if allowed."""
    return {name: os.environ.get(name, str(value)) for name, (_, value) in _MALLOC.items()} | {
        RUN_VARIABLE: run_id,
        "TMPDIR": str(temporary_directory(run_id)),
        "SPT_NOENV": "1",  # setproctitle would overwrite the environment that the janitor reads
    }


def _enter(variables: Mapping[str, str]) -> None:
    """Set the variables; glibc has read its own at the start of this process."""
    libc = ctypes.CDLL(None)
    for name, (option, value) in _MALLOC.items():
        if name not in os.environ:
            libc.mallopt(option, value)
    os.environ.update(variables)


def spawn(command: Sequence[str], *, env: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start a program that dies with the calling thread, in its own session, its output appended to `log_file`.

    `env` is added to this process's environment. Only its owner can read the log, because programs may log secrets.
    Raises OSError if it cannot be opened.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "ab", opener=private) as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", bound.__file__, str(os.getpid()), *command],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def local_interface(address: str) -> str:
    """Return the name of the network interface that reaches `address`, without sending a packet."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.split("%")[0] == own for a in addresses):
            return name
    raise OSError(f"no network interface of this host has the address {own}, from which {address} is reached")


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make gloo listen only on loopback in process groups created in the block."""
    before = os.environ.get(GLOO_VARIABLE)
    os.environ[GLOO_VARIABLE] = local_interface("127.0.0.1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO_VARIABLE]
        else:
            os.environ[GLOO_VARIABLE] = before
