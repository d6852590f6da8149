"""The interface of every kind of sandbox, and the outcome of a command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

type Limit = Literal["time", "memory", "processes", "disk", "output"]
"""The limit that a command has met."""

WORK = "/tmp/work"  # of the sandbox
HOME_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORK,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
}
GRACE_S = 30.0  # after a command's own limit, for a sandbox to answer
USER_ID = 65534  # of commands, and of their group


class SandboxError(Exception):
    """A sandbox failed to start or has ended; the message has the reason."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `status` is its exit code, or 128 + N if signal N ended it."""

    status: int
    stdout: bytes
    stderr: bytes
    limit: Limit | None
    seconds: float


class Box(Protocol):
    """One running sandbox, which runs one command at a time."""

    async def run(self, command: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int) -> Outcome:
        """Run a program in WORK, then kill its child processes; `output_bytes` limits each of its two outputs.

        Raises SandboxError if the sandbox has ended.
        """
        ...

    async def close(self) -> None:
        """Stop everything in the sandbox and remove its files; return when they are gone."""
        ...


class SandboxBackend(Protocol):
    """Starts sandboxes. It is called with the section `episode.sandbox` (SandboxConfig), in each worker process."""

    async def start(self) -> Box:
        """Start a sandbox with an empty working directory. Raises SandboxError."""
        ...
