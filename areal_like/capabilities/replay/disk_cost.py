"""The disk space that recording may take, before the start."""

import shutil
from collections.abc import Iterator

from allocation.diagnostics import Finding, Severity
from areal_like.capabilities.replay.schema import ReplayKeys
from areal_like.capability import served_forms
from areal_like.core.config.findings import finding
from areal_like.core.config.keys import with_keys
from areal_like.known import Known

COLUMNS = 3 * 4  # bytes of a token: its id, its log-prob and its version
INPUT = 4  # of each log-prob or value that the algorithm needs
IDS = 4  # of each id that a sampling mask keeps, or that a teacher finds likely
TRAJECTORY = 600  # of a trajectory's numbers and its part in schedules
RANK_STATE = 200_000  # of the digests of a rank's tensors


def check_disk(known: Known) -> Iterator[Finding]:
    """Report the disk space that the recorded steps may take; warn if it is not free, or if nothing is recorded."""
    section = with_keys(known.config.recover, ReplayKeys)
    if not section.replay or known.config.recover.mode == "off":
        return
    step = step_bytes(known)
    total = step * section.replay_keep
    message = f"a recorded step takes at most {_size(step)}, and recover.replay_keep={section.replay_keep} of them {_size(total)}"
    parent = next(path for path in (known.config.run_dir, *known.config.run_dir.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if total > free:
        fits = max(1, int(free * 0.9 / step))
        help = f"set recover.replay_keep={fits}, or recover.replay=false"
        severity = Severity.WARNING if step < free else Severity.ERROR
        message = f"{message}, where {parent} has {_size(free)}"
        yield finding("RUN-RECORD-DISK", "recover.replay_keep", message, help, severity=severity)
    else:
        yield finding("RUN-RECORD-SIZE", "recover.replay_keep", message, severity=Severity.NOTE)


def step_bytes(known: Known) -> int:
    """Return the most bytes that a step's file may have, with responses of maximum length."""
    config = known.config
    trajectories = config.prompts_per_step * config.gconfig.n_samples
    needs = {need for algorithm in known.algorithms.values() if algorithm for need in algorithm.needs}
    per_token = COLUMNS + INPUT * len(needs) + sum(form.token_bytes for form in served_forms(known).values())
    if config.gconfig.top_k > 0:
        per_token += IDS * config.gconfig.top_k
    if config.teacher is not None and config.teacher.top_k:
        per_token += 2 * IDS * config.teacher.top_k
    ranks = sum(known.plan.engine(role).world_size for role in config.roles) if known.plan else 1
    return trajectories * (config.longest_sequence * per_token + TRAJECTORY) + ranks * RANK_STATE


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
