"""What can go wrong with the processes of a run, in the user's words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class ClusterError(RuntimeError):
    """Ray did not start, was not reached, or cannot give what the plan asks for."""


@dataclass(eq=False)
class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; str() is one message for the user.

    `cause` is the remote exception's own line, `remote_traceback` all of it ("" where the process died or hung).
    """

    role: str
    rank: int
    phase: str
    cause: str
    log_file: Path
    remote_traceback: str = ""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} failed during {self.phase}: {self.cause}\n  its output: {self.log_file}"
