"""Sandboxes made by bubblewrap: namespaces, a read-only root and a /tmp of limited size; `inside.py` is process 1.

For ordinary users, bubblewrap creates a user namespace. For root it does not need one: process 1 is root with only the
capabilities to change its user and to kill, and each command runs as USER_ID.
"""

import asyncio
import json
import os
import shutil
import signal
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_like.capabilities.sandbox import inside
from areal_like.capabilities.sandbox.protocol import GRACE_S, HOME_VARIABLES, USER_ID, WORK, Outcome, SandboxError
from areal_like.capabilities.sandbox.schema import SandboxConfig

PROGRAM = "bwrap"
START_S = 60.0
CLOSE_S = 10.0  # for process 1 to end by itself
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = (
    *("passwd", "group", "nsswitch.conf", "localtime", "profile", "bash.bashrc", "alternatives", "mime.types"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl/certs", "ca-certificates.conf", "magic"),
)
_INSIDE = "/sandbox.py"
_OF_NETWORK = ("resolv.conf", "hosts")
_CAPABILITIES_OF_ROOT = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")  # of process 1: change its user, kill commands


class Bubblewrap:
    """See Backend."""

    def __init__(self, settings: SandboxConfig) -> None:
        self._settings = settings

    async def start(self) -> "BubblewrapBox":
        program = shutil.which(PROGRAM)
        if program is None:
            raise SandboxError("bubblewrap (bwrap) is not installed")
        process = await asyncio.create_subprocess_exec(
            program,
            *_arguments(self._settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        box = BubblewrapBox(process)
        try:
            async with asyncio.timeout(START_S):
                about, _ = await box.receive()
        except BaseException as error:
            problem = await box.end()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"bubblewrap did not start within {START_S:g} s") from error
            if isinstance(error, SandboxError):
                raise SandboxError(problem or "bubblewrap ended at once") from error
            raise
        if not about["ready"]:
            await box.close()
            raise SandboxError(f"the system-call filter does not support this machine ({about['machine']})")
        return box


class BubblewrapBox:
    """See Box."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, command: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int) -> Outcome:
        request = {"command": list(command), "timeout_s": timeout_s, "output_bytes": output_bytes, "stdin": len(stdin)}
        head = json.dumps(request).encode()
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                self._pipe.write(struct.pack("<I", len(head)) + head + stdin)
                await self._pipe.drain()
                about, more = await self.receive()
        except TimeoutError as error:
            await self.end()
            raise SandboxError(f"the sandbox did not answer within {timeout_s + GRACE_S:g} s") from error
        except (ConnectionError, BrokenPipeError) as error:
            raise SandboxError("the sandbox has ended") from error
        if about["failure"]:
            raise SandboxError(f"the sandbox cannot run a command: {about['failure']}")
        out = about["stdout"]
        return Outcome(about["status"], more[:out], more[out:], about["limit"], about["seconds"])

    async def close(self) -> None:
        self._pipe.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._process.communicate()  # wait() would hang with unread output
        except TimeoutError:
            await self.end()
        except BaseException:
            await self.end()
            raise

    async def end(self) -> str:
        """Kill the sandbox; return the output of bubblewrap."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)  # process 1 dies with it, and the others with process 1
        said = b""
        with suppress(TimeoutError):  # a process may hold the pipes if bubblewrap was killed while it started
            async with asyncio.timeout(CLOSE_S):
                _, said = await self._process.communicate()
        return said.decode(errors="replace").strip()

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return a reply of process 1."""
        reader = self._process.stdout
        assert reader is not None  # for the type checker: it is a pipe
        try:
            size = struct.unpack("<I", await reader.readexactly(4))[0]
            about: dict[str, Any] = json.loads(await reader.readexactly(size))
            return about, await reader.readexactly(about.get("stdout", 0) + about.get("stderr", 0))
        except asyncio.IncompleteReadError as error:
            raise SandboxError("the sandbox has ended") from error

    @property
    def _pipe(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None  # for the type checker
        return self._process.stdin


def _arguments(settings: SandboxConfig) -> list[str]:
    size, is_root = str(settings.disk_mb << 20), os.geteuid() == 0
    limits = {
        "memory_mb": settings.memory_mb,
        "processes": settings.processes,
        "disk_mb": settings.disk_mb,
        "work": WORK,
        "variables": HOME_VARIABLES,
    }
    return [
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
        *("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if settings.network else ("--unshare-net",)),
        *_user(is_root),
        *_system(settings),
        *("--ro-bind", inside.__file__, _INSIDE, "--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--perms", "0777", "--dir", WORK),
        *("--dir", "/var", "--symlink", "/tmp", "/var/tmp"),
        *_show(settings.read_only),
        *("--remount-ro", "/", "--chdir", "/", "--"),
        *(sys._base_executable, "-I", "-S", _INSIDE, json.dumps(limits)),  # type: ignore[attr-defined]
    ]


def _show(paths: Iterable[str]) -> Iterator[str]:
    for path in map(Path, paths):
        for parent in reversed(path.parents[:-1]):
            yield from ("--perms", "0755", "--dir", str(parent))
        yield from ("--ro-bind", str(path), str(path))


def _user(is_root: bool) -> list[str]:
    if is_root:
        return ["--cap-drop", "ALL", *(word for name in _CAPABILITIES_OF_ROOT for word in ("--cap-add", name))]
    return ["--unshare-user", "--uid", str(USER_ID), "--gid", str(USER_ID), "--cap-drop", "ALL"]


def _system(settings: SandboxConfig) -> Iterator[str]:
    """Yield options that mount the host's programs and libraries and this process's Python, without users' data."""
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.exists():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--perms", "0755", "--dir", "/etc")
    for name in (*_SETTINGS, *(_OF_NETWORK if settings.network else ())):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        yield from ("--ro-bind", sys.base_prefix, sys.base_prefix)
