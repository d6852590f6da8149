"""The checkpoints of a run, `recover/step-N`: each is whole, or is not taken for one.

A checkpoint is written to a directory with another name. When all is there, `manifest.json` is written last, with the
name of the run and the size of every file, and then the directory gets its name. So a crash leaves either the new
checkpoint or the ones before it, and what was damaged later is noticed.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.checkpoint.files import sync_directory, write_durably
from areal_like.checkpoint.journal import read_header
from areal_like.checkpoint.state import RunState
from areal_like.errors import writing

DIRECTORY, JOURNAL, INTERRUPTED = "recover", "journal.jsonl", "interrupted"
_STATE, _MANIFEST = "state.json", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: each trained role's is in the directory `path / role`."""

    path: Path
    state: RunState


class Store:
    """The checkpoints of the run `run` in its `recover` directory, of which the last `keep` stay."""

    def __init__(self, directory: Path, run: str, keep: int) -> None:
        self._directory, self._run, self._keep = directory, run, keep
        self.last: Path | None = None

    def begin(self, version: int) -> Path:
        """An empty directory for a checkpoint that is not whole yet. Raises RecordError."""
        partial = self._directory / f".step-{version}"
        with writing(partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path, state: RunState, seconds: dict[str, float]) -> Path:
        """Make what is in `partial` the checkpoint of `state`; remove those that are too many. Raises RecordError."""
        write_durably(partial / _STATE, json.dumps(vars(state)))
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sizes = {str(file.relative_to(partial)): file.stat().st_size for file in files}
        manifest = {"run": self._run, "version": state.version, "files": sizes, "seconds": seconds}
        write_durably(partial / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
        final = self._directory / f"step-{state.version}"
        with writing(final):
            partial.rename(final)
            sync_directory(self._directory)
        self.last = final
        self._prune()
        return final

    def clean(self, version: int) -> None:
        """Remove what a run that goes on from `version` had begun; what cannot be used of later ones is put aside."""
        for unfinished in self._directory.glob(".step-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for path in _checkpoints(self._directory):
            if int(path.name.removeprefix("step-")) > version:
                aside = path.with_name(f"unused-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        self._prune()

    def _prune(self) -> None:
        for old in _checkpoints(self._directory)[self._keep :]:
            _remove(old)


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run's `recover` directory, and what is wrong with those that are newer.

    Raises CheckpointError where there are checkpoints but not the run's journal.
    """
    complaints: list[str] = []
    paths = _checkpoints(directory)
    run = read_header(directory / JOURNAL)["run"] if paths else ""
    for path in paths:
        try:
            return read(path, run), complaints
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.args[0] if type(error) is ValueError else f"it cannot be read ({error})"
            complaints.append(f"{path} is not used: {reason}")
    return None, complaints


def read(path: Path, run: str) -> Checkpoint:
    """The checkpoint of `run` at `path`; raises ValueError with what is wrong with it, and as reading files does."""
    if not (path / _MANIFEST).exists():
        raise ValueError(f"it has no {_MANIFEST}, so it was never complete")
    manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
    if manifest["run"] != run:
        raise ValueError("it is another run's")
    for name, size in manifest["files"].items():
        there = (path / name).stat().st_size if (path / name).exists() else None
        if there != size:
            raise ValueError(f"{name} " + ("is missing" if there is None else f"has {there} bytes of {size}"))
    state = RunState.from_json(json.loads((path / _STATE).read_text()))
    if path.name != f"step-{state.version}":
        raise ValueError(f"it is that of step {state.version}")
    return Checkpoint(path, state)


def _checkpoints(directory: Path) -> list[Path]:
    """Newest first."""
    found = {path.name.removeprefix("step-"): path for path in directory.glob("step-*")}
    return [found[number] for number in sorted(filter(str.isdigit, found), key=int, reverse=True)]


def _remove(path: Path) -> None:
    """Under another name first, so that no half of it is found."""
    hidden = path.with_name(f".{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
