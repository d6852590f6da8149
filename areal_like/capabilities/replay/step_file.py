"""The file of a training step, `recover/replay/step-NNNNNN.safetensors`: everything that its state cannot give.

A file is complete or absent. It is on disk before the journal has the step's line, so a committed step has its file.
The tensors are described in docs/replay.md; `about` is JSON in the file's metadata. Nothing in a file is executed.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from areal_like.capabilities.replay.arrays import Arrays, decode
from areal_like.capabilities.replay.digests import Digest, digest
from areal_like.core.checkpoint.files import names_in, sync_directory, write_durably
from areal_like.core.errors import CheckpointError, writing
from areal_like.core.types import Trajectory

FOLDER, FORMAT = "replay", 1
REMOVED = "removed.json"
_NAME = re.compile(r"step-(\d{6,})\.safetensors")
_KEY = "areal_like.replay"
_STATE = re.compile(r"state/(\w+)/(\d+)/(params|optimizer)")
TRAJECTORIES, INPUTS, SCHEDULE = "trajectories/", "inputs/", "schedule/"


@dataclass(frozen=True)
class StepFile:
    """A recorded step: `arrays` by name, and `about`, whose `digests` are the digests of the arrays."""

    arrays: Mapping[str, NDArray[Any]]
    about: Mapping[str, Any] = field(default_factory=dict)
    path: Path = Path()

    @property
    def step(self) -> int:
        """The version that the step made."""
        return int(self.about["step"])

    @property
    def statistics(self) -> dict[str, float]:
        """Statistics of the optimizer steps."""
        return dict(self.about["statistics"])

    def part(self, prefix: str) -> Arrays:
        """Return the arrays below a prefix, without it."""
        return {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}

    def trajectories(self) -> list[Trajectory]:
        """Return the step's trajectories, in the order in which they were trained. Raises CheckpointError."""
        return decode(self.part(TRAJECTORIES), str(self.about["texts"]), str(self.path))

    def states(self) -> dict[str, list[dict[str, list[Digest]]]]:
        """Return the digests of each role's tensors, by rank and part."""
        found: dict[str, list[dict[str, list[Digest]]]] = {}
        for name in sorted(self.arrays, key=_natural):
            if match := _STATE.fullmatch(name):
                role, rank, part = match.groups()
                ranks = found.setdefault(role, [])
                while len(ranks) <= int(rank):
                    ranks.append({})
                ranks[int(rank)][part] = [Digest(*map(int, row)) for row in self.arrays[name].reshape(-1, 3)]
        return found


def state_arrays(states: Mapping[str, Sequence[Mapping[str, Sequence[Digest]]]]) -> Arrays:
    """Return the arrays of `StepFile.states`."""
    return {
        f"state/{role}/{rank}/{part}": np.array(digests, np.int64).reshape(-1, 3)
        for role, ranks in states.items()
        for rank, parts in enumerate(ranks)
        for part, digests in parts.items()
    }


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split("/")]


def path_of(folder: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return folder / f"step-{step:06}.safetensors"


def write_step(folder: Path, arrays: Arrays, about: Mapping[str, Any]) -> Path:
    """Write a step's file; on return, it is on disk. Raises RecordError."""
    path = path_of(folder, int(about["step"]))
    partial = path.with_name(f".{path.name}.partial")
    digests = {name: list(digest(array)) for name, array in arrays.items()}
    described = json.dumps({"format": FORMAT, **about, "digests": digests})
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save_file(arrays, partial, {_KEY: described})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(folder)
    return path


def read_step(path: Path, run: str | None = None) -> StepFile:
    """Return a step's file, of the run `run` if it is given. Raises CheckpointError, which names the file."""
    with _open(path) as file:
        about = _read_about(file)
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return StepFile(arrays, _check_about(about, path, run), path)


def read_about(path: Path, run: str | None = None) -> Mapping[str, Any]:
    """Return the description of a step's file, without its arrays. Raises CheckpointError as `read_step`."""
    with _open(path) as file:
        about = _read_about(file)
    return _check_about(about, path, run)


_AGAIN = "Restore it from a backup, or replay a step that does not need it"


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file; raise CheckpointError, which names it, if the body finds no recorded step in it."""
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. {_AGAIN}") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is torn or is not a recorded step: {error}. {_AGAIN}") from error


def _read_about(file: Any) -> dict[str, Any]:
    about = json.loads((file.metadata() or {})[_KEY])
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    for name, kind in _FIELDS.items():
        if not isinstance(about.get(name), kind):
            raise ValueError(f"its {name} is missing")
    return about


def _check_about(about: dict[str, Any], path: Path, run: str | None) -> dict[str, Any]:
    """Return the description of a file if it is of the run, and of the step that the file is named by."""
    if run is not None and about["run"] != run:
        raise CheckpointError(
            f"{path} belongs to another run ({about['run']}) than the journal beside it ({run}). Move it out of "
            f"{path.parent}"
        )
    if path.name != (own := path_of(Path(), about["step"]).name):
        raise CheckpointError(f"{path} is the record of step {about['step']}. Rename it to {own}")
    return about


_FIELDS: Mapping[str, type] = {
    "step": int, "run": str, "program": str, "texts": str, "statistics": dict, "digests": dict, "groups": list,
    "seeds": dict, "layout": str,
}  # fmt: skip


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps that have a file, in order."""
    return sorted(int(match[1]) for name in names_in(folder) if (match := _NAME.fullmatch(name)))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` files. Raises RecordError."""
    for step in recorded_steps(folder)[:-keep]:
        with writing(path_of(folder, step)):
            path_of(folder, step).unlink(missing_ok=True)


def remove_after(folder: Path, step: int, run: str) -> list[int]:
    """Remove the files of steps that a resume after `step` discards, and of other runs; return the removed steps.

    `removed.json` remembers them for error messages. Raises RecordError.
    """
    removed = []
    for each in recorded_steps(folder):
        path = path_of(folder, each)
        if each > step or not _is_of(path, run):
            removed.append(each)
            with writing(path):
                path.unlink()
    for name in names_in(folder):
        if name.startswith(".step-"):
            (folder / name).unlink(missing_ok=True)
    if later := [each for each in removed if each > step]:
        write_durably(folder / REMOVED, json.dumps({"after": step, "steps": later}), mode=0o600)
    return removed


def removed_steps(folder: Path) -> tuple[int, list[int]]:
    """Return the step after which the run last resumed, and the steps that this discarded; (0, []) if none."""
    try:
        values = json.loads((folder / REMOVED).read_text())
        return int(values["after"]), [int(step) for step in values["steps"]]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, []


def _is_of(path: Path, run: str) -> bool:
    try:
        return bool(read_about(path)["run"] == run)
    except CheckpointError:
        return False
