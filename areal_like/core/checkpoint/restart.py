"""Restart of a run that has steps but no complete checkpoint: it starts at step 0 only if `recover.restart` is set."""

from collections.abc import Sequence
from pathlib import Path

from areal_like.core.checkpoint.journal import Journal, count_steps
from areal_like.core.checkpoint.store import JOURNAL, Store
from areal_like.core.errors import CheckpointError

RESTART = "write recover.restart=true to start at step 0 again"


def lost_by_restart(directory: Path, incomplete: Sequence[str]) -> str:
    """Return the files that a start at step 0 discards in a `recover` directory without a complete checkpoint, "" if
    nothing."""
    steps = count_steps(directory / JOURNAL)
    there = [f"{steps} steps in its journal"] if steps else []
    if incomplete:
        there.append(f"{len(incomplete)} incomplete checkpoints ({'; '.join(incomplete)})")
    return f"the run in {directory.parent} has {' and '.join(there)}, but no complete checkpoint" if there else ""


def put_aside(journal: Journal, store: Store, incomplete: Sequence[str], *, restart: bool) -> str:
    """Put incomplete checkpoints and the journal aside for a start at step 0; return the names, "" if there are none.

    Raises CheckpointError unless `recover.restart` is set.
    """
    lost = lost_by_restart(store.directory, incomplete)
    if lost and not restart:
        raise CheckpointError(
            f"{lost}. The same command does not discard them by itself: {RESTART}, or choose another trial_name"
        )
    if lost:
        store.clean(0)  # before the journal: checkpoints without a journal are rejected
        journal.put_aside()
    return lost
