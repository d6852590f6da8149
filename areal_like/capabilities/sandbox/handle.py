"""The sandbox object of workflows: `async def run(row, client, sandbox)`."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from areal_like.capabilities.sandbox.pool import Pool
from areal_like.capabilities.sandbox.protocol import Box, Limit, Outcome, SandboxError
from areal_like.capabilities.sandbox.schema import SandboxConfig

SHELL = ("/bin/sh", "-c")
FILE_S = 60.0  # to move a file
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_READ = 'cat < "$1"'


@dataclass(frozen=True)
class CommandResult:
    """How a command ended.

    `status` is its exit code, or 128 + N if signal N ended it. `limit` is the limit that it reached: `time`, `memory`,
    `processes`, `disk` or `output`; None if none.
    """

    status: int
    stdout: str
    stderr: str
    limit: Limit | None
    seconds: float


class Sandbox:
    """A sandbox of one episode; the first command starts it, or takes it from the warm ones.

    `usage` counts commands, the limits that they reached, and the seconds of the start and of the wait for it.
    """

    def __init__(self, pool: Pool, settings: SandboxConfig) -> None:
        self._pool, self._settings = pool, settings
        self._box: Box | None = None
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[Outcome]] = set()
        self._closed = False
        self.usage: dict[str, float] = defaultdict(float)

    async def run(
        self, command: str | Sequence[str], *, timeout_s: float | None = None, stdin: str | bytes = b""
    ) -> CommandResult:
        """Run a shell command, or a program with arguments, in the sandbox's working directory.

        Files stay for the next command; the command's child processes end with it. `timeout_s` is
        `episode.sandbox.timeout_s` by default. Raises SandboxError if the sandbox does not start or has ended.
        """
        words = [*SHELL, command] if isinstance(command, str) else [str(word) for word in command]
        if words and "/" not in words[0]:
            words = [*SHELL, 'exec "$@"', "sh", *words]
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        outcome = await self._run(words, _bytes(stdin), limit_s, self._settings.output_kb << 10)
        self.usage["commands"] += 1
        if outcome.limit:
            self.usage[f"limit_{outcome.limit}"] += 1
        out, err = (each.decode(errors="replace") for each in (outcome.stdout, outcome.stderr))
        return CommandResult(outcome.status, out, err, outcome.limit, outcome.seconds)

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file; a relative path begins in the working directory. Raises OSError."""
        outcome = await self._run([*SHELL, _WRITE, "sh", path], _bytes(content), FILE_S, 1 << 12)
        _check(outcome, path)

    async def read(self, path: str) -> bytes:
        """Return a file's content, at most as large as the disk. Raises OSError."""
        outcome = await self._run([*SHELL, _READ, "sh", path], b"", FILE_S, self._settings.disk_mb << 20)
        _check(outcome, path)
        return outcome.stdout

    async def close(self) -> None:
        """Stop everything in the sandbox."""
        self._closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if self._box is not None:
            box, self._box = self._box, None
            with suppress(SandboxError):  # the sandbox has ended by itself
                await box.close()

    async def _run(self, command: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int) -> Outcome:
        """Run a command to its end even if the caller is cancelled, because the next command must wait for it."""
        if not command or any("\0" in word for word in command):
            raise ValueError(f"a command has words, none of them with a NUL: {command!r}")
        body = self._exchange(command, stdin, timeout_s, output_bytes)
        task = asyncio.get_running_loop().create_task(body)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _exchange(self, command: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int) -> Outcome:
        async with self._one_at_a_time:
            if self._closed:
                raise SandboxError("the episode of this sandbox is over")
            if self._box is None:
                began = time.monotonic()
                self._box, self.usage["start_s"] = await self._pool.take()
                self.usage["starts"] = 1
                self.usage["wait_s"] = time.monotonic() - began
            return await self._box.run(command, stdin, timeout_s, output_bytes)


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _check(outcome: Outcome, path: str) -> None:
    if outcome.status or outcome.limit:
        why = outcome.stderr.decode(errors="replace").strip() or f"status {outcome.status}"
        raise OSError(f"{path} in the sandbox: {why}" + (f" (limit: {outcome.limit})" if outcome.limit else ""))
