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
GRACE_S = 30.0  # beyond a command's own limit, in which a sandbox has to answer
USER_ID = 65534  # of commands, and of their group


class SandboxError(Exception):
    """A sandbox does not start, or has ended; the message has the reason."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `status` is its exit code, or 128 + N where signal N ended it."""

    status: int
    stdout: bytes
    stderr: bytes
    limit: Limit | None
    seconds: float


class Box(Protocol):
    """One running sandbox; it has one command at a time."""

    async def run(self, command: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int) -> Outcome:
        """Run a program in WORK, and end everything it has started; `output_bytes` limits each of its two outputs.

        Raises SandboxError if the sandbox has ended.
        """
        ...

    async def close(self) -> None:
        """End everything in the sandbox, and remove what it has stored; return when it is gone."""
        ...


class Backend(Protocol):
    """Starts sandboxes. It is called with the section `episode.sandbox` (SandboxConfig), in each worker process."""

    async def start(self) -> Box:
        """Start a sandbox with an empty working directory. Raises SandboxError."""
        ...
