"""The checkpoints of a run, `recover/step-N`; incomplete checkpoints are recognized and ignored.

A checkpoint is written to a directory with a temporary name. `manifest.json` is written last, with the name of the run
and the size of every file, and then the directory is renamed. So a crash leaves either the new checkpoint or the
earlier ones, and later damage is noticed.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from areal_like.core.checkpoint.files import names_in, reading, size_of, sync_directory, write_durably
from areal_like.core.checkpoint.journal import Journal, RunState, count_steps, program_version, read_header
from areal_like.core.errors import CheckpointError, writing

DIRECTORY, JOURNAL, INTERRUPTED = "recover", "journal.jsonl", "interrupted"
_STATE, _MANIFEST = "state.json", "manifest.json"
RESTART = "write recover.restart=true to start at step 0 again"
_NAME = re.compile(r"step-[0-9]+")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; each trained role has the directory `path / role`."""

    path: Path
    state: RunState


class Incomplete(CheckpointError):
    """A checkpoint that was not written completely, or has lost a part."""


class Store:
    """The checkpoints of the run `run` in its `recover` directory, the last `keep` stay.

    `check` raises before a write if another process has taken the directory.
    """

    def __init__(self, directory: Path, run: str, keep: int, check: Callable[[], None] = lambda: None) -> None:
        self.directory, self._run, self._keep, self._check = directory, run, keep, check
        self.last: Path | None = None

    def begin(self, version: int) -> Path:
        """Create an empty directory for an incomplete checkpoint. Raises RecordError.

        Its name is new, because a rank on a lost host may still write to the last one.
        """
        partial = self.directory / f".step-{version}-{token_hex(4)}"
        self._check()
        with writing(partial):
            partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path, state: RunState, seconds: dict[str, float]) -> Path:
        """Make the directory `partial` the checkpoint of `state`; remove old checkpoints. Raises RecordError."""
        write_durably(partial / _STATE, json.dumps(vars(state)))
        with writing(partial):
            sizes = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
        about = {"run": self._run, "program": program_version(), "version": state.version}
        manifest = {**about, "files": sizes, "seconds": seconds}
        write_durably(partial / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
        final = self.directory / f"step-{state.version}"
        self._check()
        with writing(final):
            partial.rename(final)
            sync_directory(self.directory)
        self.last = final
        self._prune()
        return final

    def clean(self, version: int) -> None:
        """Remove the unfinished work of a run that resumes from `version`; unusable later checkpoints are renamed.

        Raises RecordError.
        """
        self._check()
        for name in names_in(self.directory):
            if name.startswith(".step-"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        for path in checkpoints(self.directory):
            if _number(path) > version:
                aside = path.with_name(f"unused-{path.name}")
                with writing(aside):
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
        self._prune()

    def _prune(self) -> None:
        for old in checkpoints(self.directory)[self._keep :]:
            with writing(old):
                _remove(old)


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint of a run's `recover` directory, and the missing parts of newer ones.

    Raises CheckpointError if one of them is damaged in another way, cannot be read, or belongs to another run or
    version, and for checkpoints without the run's journal.
    """
    incomplete: list[str] = []
    paths = checkpoints(directory)
    run = read_header(directory / JOURNAL)["run"] if paths else ""
    for path in paths:
        try:
            return read(path, run), incomplete
        except Incomplete as error:
            incomplete.append(str(error))
    return None, incomplete


def read(path: Path, run: str) -> Checkpoint:
    """Return the checkpoint of `run` at `path`. Raises Incomplete, or CheckpointError if it is unusable."""
    if size_of(path / _MANIFEST) is None:
        raise Incomplete(f"{path} is not whole: it has no {_MANIFEST}, so it was never complete")
    manifest = _read_json(path, _MANIFEST, "run", "files")
    if manifest["run"] != run:
        raise CheckpointError(f"{path} is another run's, and is not used. Move it out of {path.parent}")
    for name, length in manifest["files"].items():
        there = size_of(path / name)
        if there != length:
            what = "is missing" if there is None else f"has {there} bytes of {length}"
            raise Incomplete(f"{path} is not whole: {name} {what}")
    values = _read_json(path, _STATE)
    try:
        state = RunState.from_json(values)
    except ValueError as error:
        raise CheckpointError(
            f"{path / _STATE} cannot be used: {error}. Version {manifest.get('program', 'unknown')} of areal-like wrote "
            f"it, this is {program_version()}. Resume with the version that wrote it, or choose another trial_name"
        ) from error
    if path.name != f"step-{state.version}":
        other = f"it is the checkpoint of step {state.version}"
        raise CheckpointError(
            f"{path} cannot be used: {other}. Give it its name again, or move it out of {path.parent}"
        )
    return Checkpoint(path, state)


def _read_json(checkpoint: Path, name: str, *keys: str) -> dict[str, Any]:
    """Return an object with these keys from a file whose size is unchanged."""
    path = checkpoint / name
    try:
        with reading(path):
            values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.keys() >= {*keys}:
            return values
        problem = f"it has no {', '.join(keys)}" if keys else "it is not an object"
    except ValueError as error:
        problem = str(error)
    raise CheckpointError(
        f"{path} is damaged: {problem}. Restore it from a backup; or move {checkpoint} away, and the same command "
        "resumes from the checkpoint before it"
    )


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints, newest first."""
    found = [name for name in names_in(directory) if _NAME.fullmatch(name)]
    return sorted((directory / name for name in found), key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _files(directory: Path) -> list[Path]:
    """Return all files below a directory. Raises OSError."""

    def refuse(error: OSError) -> None:
        raise error

    folders = os.walk(directory, onerror=refuse)
    return sorted(Path(folder, name) for folder, _, names in folders for name in names)


def _remove(path: Path) -> None:
    """Rename and then remove a directory, so that no half-removed checkpoint is found."""
    hidden = path.with_name(f".{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


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
