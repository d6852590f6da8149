"""Sandboxes in containers, through the command lines of docker and podman.

Process 1 of a container waits for the end of its standard input, which the worker process holds. When the worker ends,
in any way, the container ends and is removed. The run's janitor removes containers left after SIGKILL
(`cluster/containers.py`). Commands run as another user than process 1, so that all of them can be killed at once.
"""

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from areal_like.backends.ray.containers import label, note_containers
from areal_like.backends.ray.janitor import RUN_VARIABLE
from areal_like.capabilities.sandbox.protocol import (
    GRACE_S,
    HOME_VARIABLES,
    USER_ID,
    WORK,
    Limit,
    Outcome,
    SandboxError,
)
from areal_like.capabilities.sandbox.schema import SandboxConfig

START_S = 120.0
STOP_S = 30.0
_READY = b"ready\n"
_CHUNK = 1 << 16
_KILLED = 137  # exit status after SIGKILL, which the kernel sends when memory runs out
_KEEP = 'mkdir -m 777 -p "$1" && echo ready && while read -r line; do :; done'
_RUN = '"$@"; status=$?; kill -9 -1; exit $status'  # the shell itself survives
_FEED = 'size=$1; shift; head -c "$size" | "$@"; status=$?; kill -9 -1; exit $status'
_END = "kill -9 -1"


class Containers:
    """See Backend; `settings.backend` is the program."""

    def __init__(self, settings: SandboxConfig) -> None:
        self._settings = settings
        self._run_id = os.environ.get(RUN_VARIABLE)  # none before the run

    async def start(self) -> "Container":
        program = shutil.which(self._settings.backend)
        if program is None:
            raise SandboxError(f"{self._settings.backend} is not installed")
        if self._settings.image is None:
            raise SandboxError("episode.sandbox.image names no image")
        if self._run_id:
            note_containers(Path(os.environ["TMPDIR"]), program)
        name = f"areal-sandbox-{uuid.uuid4().hex[:16]}"
        process = await _spawn([program, "run", *self._options(name), self._settings.image, "-c", _KEEP, "sh", WORK])
        box = Container(program, name, process)
        try:
            async with asyncio.timeout(START_S):
                answer = await process.stdout.readline()  # type: ignore[union-attr]
        except BaseException:
            await box.close()
            raise
        if answer != _READY:
            said = await process.stderr.read(_CHUNK)  # type: ignore[union-attr]
            await box.close()
            raise SandboxError(said.decode(errors="replace").strip() or f"{self._settings.backend} run gave {answer!r}")
        return box

    def _options(self, name: str) -> list[str]:
        own, disk, memory = self._settings, f"{self._settings.disk_mb}m", f"{self._settings.memory_mb}m"
        return [
            *("--rm", "--interactive", "--init", "--pull", "never", "--name", name),
            *(("--label", label(self._run_id)) if self._run_id else ()),
            *("--network", "host" if own.network else "none", "--read-only", "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--user", f"{USER_ID - 1}:{USER_ID - 1}"),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(own.processes)),
            *("--ulimit", "core=0", "--ulimit", "nofile=1024:1024"),
            *("--tmpfs", f"/tmp:rw,exec,mode=1777,size={disk}", "--shm-size", disk),
            *(word for path in own.read_only for word in ("--volume", f"{path}:{path}:ro")),
            *("--entrypoint", "/bin/sh"),
        ]


class Container:
    """See Box."""

    def __init__(self, program: str, name: str, process: asyncio.subprocess.Process) -> None:
        self._program, self._name, self._process = program, name, process

    async def run(self, command: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int) -> Outcome:
        """See Box. Reports the memory limit if the kernel killed the command itself, but never disk and processes."""
        began = time.monotonic()
        fed = [_FEED, "sh", str(len(stdin))] if stdin else [_RUN, "sh"]
        process = await _spawn([*self._exec("--interactive" if stdin else ""), "/bin/sh", "-c", *fed, *command])
        outputs = [_Output(stream, output_bytes) for stream in (process.stdout, process.stderr) if stream]
        feeding = asyncio.create_task(_feed(process, stdin))
        try:
            limit = await _find_limit(process, outputs, timeout_s)
            if limit:
                await self._kill_commands()
            async with asyncio.timeout(GRACE_S):
                status = await process.wait()
                await asyncio.gather(*(output.reading for output in outputs))
        except TimeoutError as error:
            raise SandboxError(f"{self._program} did not end a command within {GRACE_S:g} s") from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            for task in (feeding, *(output.reading for output in outputs)):
                task.cancel()
        if self._process.returncode is not None:
            raise SandboxError("the container has ended")
        met: Limit | None = limit or ("memory" if status == _KILLED else None)
        out, err = (bytes(output.data) for output in outputs)
        return Outcome(_KILLED if limit else status, out, err, met, time.monotonic() - began)

    async def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        removing = await _spawn([self._program, "rm", "--force", "--volumes", self._name])
        for process in (removing, self._process):
            try:
                async with asyncio.timeout(STOP_S):
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _exec(self, option: str = "") -> list[str]:
        variables = [word for name, value in HOME_VARIABLES.items() for word in ("--env", f"{name}={value}")]
        user = f"{USER_ID}:{USER_ID}"
        options = [option] if option else []
        return [self._program, "exec", *options, "--user", user, "--workdir", WORK, *variables, self._name]

    async def _kill_commands(self) -> None:
        process = await _spawn([*self._exec(), "/bin/sh", "-c", _END])
        async with asyncio.timeout(GRACE_S):
            await process.communicate()


async def _spawn(command: Sequence[str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(os.environ), start_new_session=True
        )
    except OSError as error:
        raise SandboxError(f"{command[0]} cannot be executed: {error.strerror}") from error


class _Output:
    """The beginning of an output; the rest is read and dropped, because a process ends only when its output is read."""

    def __init__(self, stream: asyncio.StreamReader, most: int) -> None:
        self.data = bytearray()
        self.too_long = asyncio.Event()
        self.reading = asyncio.create_task(self._read(stream, most))

    async def _read(self, stream: asyncio.StreamReader, most: int) -> None:
        while chunk := await stream.read(_CHUNK):
            self.data += chunk
            if len(self.data) > most:
                del self.data[most:]
                self.too_long.set()


async def _find_limit(
    process: asyncio.subprocess.Process, outputs: Sequence[_Output], timeout_s: float
) -> Limit | None:
    """Wait until a command has ended, its time limit is reached or one of its outputs is too long."""
    ending = asyncio.create_task(process.wait())
    too_long = [asyncio.create_task(output.too_long.wait()) for output in outputs]
    try:
        done, _ = await asyncio.wait((ending, *too_long), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (ending, *too_long):
            task.cancel()
    if any(output.too_long.is_set() for output in outputs):
        return "output"
    return None if done else "time"


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    """Send the input without closing it, because podman may then lose the output."""
    writer = process.stdin
    assert writer is not None  # for the type checker: it is a pipe
    with suppress(ConnectionError):  # the command does not read it
        writer.write(stdin)
        await writer.drain()
