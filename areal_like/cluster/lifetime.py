"""Everything a run leaves on a host, so that it ends with the run: processes, ports, temporary files."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from areal_like.cluster import bound, janitor
from areal_like.cluster.janitor import RUN_VARIABLE, member_file
from areal_like.cluster.lineage import Identity, identity, lives, ticks_now
from areal_like.cluster.ports import PORTS_VARIABLE
from areal_like.errors import private
from areal_like.runtime.descendants import adopt_orphans, children

SLOW_JANITOR_S = 10.0
JANITOR_LIMIT_S = janitor.LIMIT_S + 240  # on a busy machine or a slow file system; then it continues alone
PACKAGE_ROOT = Path(__file__).parents[2]
# Number and value of glibc's options (mallopt(3)): by default it gives the memory of every large tensor back to the
# system and takes it anew, a page fault for each 4 KiB.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30), "MALLOC_MMAP_THRESHOLD_": (-3, 256 << 20)}
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"  # gloo reads it whenever a process group is made
LAST_LINES, LAST_BYTES = 15, 16384  # of a failed process's output, in its error
LONGEST_TMP = 24  # characters; Ray and SGLang put Unix sockets below it, whose paths end at 107


@contextmanager
def run_lifetime(
    run_id: str, *shared_dirs: Path, lock: int | None = None, adopts: bool = True, ports: str | None = None
) -> Iterator[Path]:
    """Give the run a temporary directory, and a janitor that outlives this process.

    Every process that is started inside is a member of the run. When the block ends, or this process does in
    whatever way, the janitor ends those that are left and removes the directory; both are gone within 10 seconds, or
    the janitor is waited for. So are `shared_dirs`, absolute paths: every host's janitor removes them, the last one
    when nobody writes there now. The janitor keeps the descriptor `lock` open for as long as it lives.
    Without `adopts` this process does not become the parent of orphans, and so not of its janitor either. Sockets that
    may have any port have one of the range `ports`.
    """
    directory = temporary_directory(run_id)
    directory.mkdir(mode=0o700, exist_ok=True)
    variables = _variables(run_id) | ({PORTS_VARIABLE: ports} if ports else {})
    before = {name: os.environ.get(name) for name in variables}
    others = children()
    adopts = adopts and not others  # an orphan of theirs would look like one of the run's
    if adopts:
        adopt_orphans()
    # the janitor of one node is not a member that another's may end
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
    """Wait for the janitor, and report if it needs longer than its limits."""
    with suppress(OSError):  # it is gone
        os.write(keeper.stdin.fileno(), b"%d\n" % ticks_now())  # type: ignore[union-attr]
    for limit_s, what in ((SLOW_JANITOR_S, "still busy; waiting for it"), (JANITOR_LIMIT_S, "left to end by itself")):
        try:
            janitor_id, _ = keeper.communicate(timeout=limit_s)
            with suppress(ChildProcessError, ValueError):  # it is not this process's child, or never began
                os.waitpid(int(janitor_id), 0)
            return
        except subprocess.TimeoutExpired:
            print(f"areal-like: the clean-up of {directory} is {what} (process {keeper.pid})", file=sys.stderr)


def temporary_directory(run_id: str) -> Path:
    """Return where the run keeps temporary files on each of its hosts; a short path, because sockets lie below it."""
    root = tempfile.gettempdir()
    return Path(root if len(root) <= LONGEST_TMP else "/tmp") / f"areal-{run_id}"


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while something short has to be finished; it counts in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Caretaker:
    """Holds `run_lifetime` on a node of an existing cluster, where the run's own process may not be."""

    def __init__(self, run_id: str, shared_dir: Path) -> None:
        self._lifetime = ExitStack()
        self._lifetime.enter_context(run_lifetime(run_id, shared_dir, adopts=False))

    def last_lines(self, file: Path) -> list[str]:
        """Return the last lines of a file of this node; none if it is missing."""
        with suppress(OSError), file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - LAST_BYTES))
            return [line for line in opened.read().decode(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
        return []

    def close(self) -> None:
        """End what the run left on this node; returns when it is gone."""
        self._lifetime.close()


def join_run(run_id: str) -> None:
    """Make the processes that this one starts members of the run; it may be one itself already."""
    if os.environ.get(RUN_VARIABLE) != run_id:
        _enter(_variables(run_id))


def end_with_run(run_id: str) -> None:
    """Have this host's janitor of the run, if there is one, end this process and all that descend from it."""
    adopt_orphans()
    _join(temporary_directory(run_id))


def _join(directory: Path) -> None:
    _joined[directory] = identity(os.getpid())
    with suppress(OSError):
        member_file(directory).touch()


def _join_again() -> None:
    """Become a member in one's own name, as a fork of a member, before the next moment, when that may be killed."""
    for directory, member in _joined.items():
        with suppress(OSError):
            member_file(directory).touch()
        if not lives(member):  # the janitor may have done its work
            os._exit(1)


_joined: dict[Path, Identity] = {}  # temporary directory of each run that this process, or what forked it, has joined
os.register_at_fork(after_in_child=_join_again)


def _variables(run_id: str) -> dict[str, str]:
    """Return the environment of every process of a run; variables set by the user win where the run allows it."""
    return {name: os.environ.get(name, str(value)) for name, (_, value) in _MALLOC.items()} | {
        RUN_VARIABLE: run_id,
        "TMPDIR": str(temporary_directory(run_id)),
        "SPT_NOENV": "1",  # setproctitle would overwrite the environment that the janitor reads
    }


def _enter(variables: Mapping[str, str]) -> None:
    """Set the variables; glibc read its own when this process started."""
    libc = ctypes.CDLL(None)
    for name, (option, value) in _MALLOC.items():
        if name not in os.environ:
            libc.mallopt(option, value)
    os.environ.update(variables)


def spawn(command: Sequence[str], *, env: Mapping[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start a program that dies with the calling thread, in its own session, its output appended to `log_file`.

    `env` is added to this process's environment. The log is its owner's alone to read, for programs write their secrets
    there too. Raises OSError if it cannot be opened.
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
    """Name of this host's network interface from which `address` is reached; no packet is sent."""
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
    """Have gloo listen on loopback alone in process groups that are made in the block."""
    before = os.environ.get(GLOO_VARIABLE)
    os.environ[GLOO_VARIABLE] = local_interface("127.0.0.1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO_VARIABLE]
        else:
            os.environ[GLOO_VARIABLE] = before
