"""Checksums of the files of recovery checkpoints, so that later damage is found and named."""

import hashlib
import json
from pathlib import Path

from areal_like.capabilities.replay.step_file import FOLDER
from areal_like.core.checkpoint.files import names_in, write_durably
from areal_like.core.errors import CheckpointError

_CHECKSUM = "sha256"


def note_checkpoints(directory: Path) -> None:
    """Write the checksums of checkpoints that have none yet, and remove the checksums of deleted checkpoints.

    A checkpoint may be removed meanwhile. Raises RecordError.
    """
    folder = directory / FOLDER
    there = {name for name in names_in(directory) if name.startswith("step-")}
    noted = {
        name.removesuffix(".json") for name in names_in(folder) if name.startswith("step-") and name.endswith(".json")
    }
    for name in sorted(there - noted):
        try:
            sums = {str(path.relative_to(directory / name)): checksum(path) for path in files_of(directory / name)}
        except FileNotFoundError:
            continue
        write_durably(folder / f"{name}.json", json.dumps({"checksum": _CHECKSUM, "files": sums}, indent=1), mode=0o600)
    for name in noted - there:
        (folder / f"{name}.json").unlink(missing_ok=True)


def check_checkpoint(checkpoint: Path) -> str:
    """Raise CheckpointError, which names the file, unless a checkpoint's files have their checksums.

    Returns a summary of the check, "" if the checkpoint has no checksums, as after a kill shortly after it was written.
    """
    noted = checkpoint.parent / FOLDER / f"{checkpoint.name}.json"
    try:
        sums = dict(json.loads(noted.read_text())["files"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{noted} is damaged: {error}. Remove it to use {checkpoint} unchecked") from error
    for name, expected in sums.items():
        path = checkpoint / name
        if not path.is_file() or checksum(path) != expected:
            raise CheckpointError(
                f"{path} has changed since the run wrote it ({_CHECKSUM} differs). Restore {checkpoint} from a backup, or "
                "move it away: an earlier checkpoint is used then"
            )
    return f"{len(sums)} files of {checkpoint.name} have their checksums"


def files_of(directory: Path) -> list[Path]:
    """Return all files below a directory."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def checksum(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _CHECKSUM).hexdigest()
