"""Errors that can end a run, in the user's words; `str()` of each is the complete message."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class RunError(RuntimeError):
    """The run cannot continue, or cannot start."""


class PreparationError(RunError):
    """The run's directory cannot be written, or its model cannot be made or downloaded."""


class DirectoryTaken(PreparationError):
    """Another run began in the run's directory after the checks."""


class ClusterError(RunError):
    """Ray did not start, was not reached, or lacks the resources of the plan."""


@dataclass(eq=False)
class WorkerError(RunError):
    """A worker failed, died or did not answer in time.

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


Fault = Literal[
    "refused", "server_error", "connection", "late", "unusable", "wrong_labels", "wrong_version", "half_answer", "stalled",
    "left",
]  # fmt: skip
"""How a server failed, as the step record counts it (`server_faults/...`)."""


class ServerError(RunError):
    """A server refused, failed or did not answer in time; the message names and quotes it; `servers` has it alone."""

    def __init__(self, message: str, fault: Fault = "refused", servers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.fault: Fault = fault
        self.servers = servers


class WeightUpdateError(RunError):
    """Weights did not reach every server; the message names version, transport and cause."""


class LogprobMismatch(RunError):
    """Trainer and servers compute different models before the first step."""

    def __init__(self, responses: int, measured: float, allowed: float) -> None:
        super().__init__(
            f"trainer and servers give the same {responses} responses different log-probs before the first step: "
            f"{measured:.2g} apart on average, where rollout.max_logprob_diff allows {allowed:g}; likely causes:\n"
            "  - one of them reads a field of the model's config.json differently, such as rope (rope_scaling, rope_theta)"
            " or experts (norm_topk_prob, shared experts): try the other actor.megatron.bridge_type\n"
            "  - the servers sample differently from how the trainer scores: gconfig.temperature, sglang.extra_args\n"
            "  - the servers do not have the trainer's weights: try the other weight_update.mode"
        )


class RewardsMissing(RunError):
    """No response could be judged, or scored by the teacher."""

    def __init__(self, responses: int, where: str, *, has_teacher: bool = False) -> None:
        teacher = (
            " A response that the teacher cannot score has no reward either: see the messages of the teacher above, and "
            "check teacher.url, teacher.path, teacher.token_variable and teacher.timeout_s."
        )
        super().__init__(
            f"{where}: all {responses} rewards are missing, because judging them failed (the causes are listed above, "
            "tracebacks are in logs/rewards.log). If it took too long, raise reward.timeout_s or reward.workers."
            + (teacher if has_teacher else "")
        )


class RecordError(RunError):
    """A file of the run's record cannot be written, or was not written by a run; the message names both."""


class CheckpointError(RunError):
    """A run cannot resume from its checkpoints; the message names the file and the fix."""


PRIVATE_UMASK = 0o077
"""The rule for a run's directory: its owner alone may use its files (0600) and folders (0700)."""


@contextmanager
def private_files() -> Iterator[None]:
    """Let only their owner use the files that this process and the processes that it starts create in the block."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read, as an `opener`: configuration and output may be secret."""
    return os.open(path, flags, 0o600)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError of the body, such as a full disk, as a RecordError about `path`."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error
