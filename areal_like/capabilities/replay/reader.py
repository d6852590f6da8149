"""A recorded run as arrays, without the engine: `areal_like.open_run(path)`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.capabilities.replay.step_file import (
    FOLDER,
    INPUTS,
    SCHEDULE,
    TRAJECTORIES,
    StepFile,
    path_of,
    read_about,
    read_step,
    recorded_steps,
    removed_steps,
)
from areal_like.core.checkpoint.journal import Step, read_header, read_steps
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL
from areal_like.core.errors import CheckpointError

type Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. Columns of `trajectories` are flat: `lengths` has the number of tokens of each trajectory."""

    file: StepFile

    @property
    def step(self) -> int:
        """The version that the step made."""
        return self.file.step

    @property
    def statistics(self) -> Mapping[str, float]:
        """Loss, gradient norm and the other statistics of the optimizer steps."""
        return self.file.statistics

    @property
    def trajectories(self) -> Arrays:
        """The columns of the trajectories, in the order in which they were trained."""
        return self.file.part(TRAJECTORIES)

    @property
    def inputs(self) -> Arrays:
        """Inputs of the algorithm beside the trajectories, such as a reference's log-probs."""
        return self.file.part(INPUTS)

    @property
    def schedule(self) -> Arrays:
        """The micro-batch schedule of each mini-batch."""
        return self.file.part(SCHEDULE)

    def __len__(self) -> int:
        return len(self.file.arrays[f"{TRAJECTORIES}lengths"])

    def __getitem__(self, number: int) -> Arrays:
        """Return the per-token columns of one trajectory."""
        own, lengths = self.trajectories, self.file.arrays[f"{TRAJECTORIES}lengths"]
        if not -len(self) <= number < len(self):
            raise IndexError(f"step {self.step} has {len(self)} trajectories")
        end = int(lengths[: number % len(self) + 1].sum())
        start = end - int(lengths[number])
        whole = int(lengths.sum())
        return {name: array[start:end] for name, array in own.items() if len(array) == whole and name != "lengths"}


class RecordedRun:
    """A run's directory, as `areal_like.open_run` returns it. It executes nothing that it reads."""

    def __init__(self, path: Path) -> None:
        self.path, self.directory = path, path / DIRECTORY
        self.folder = self.directory / FOLDER

    @cached_property
    def run(self) -> str:
        """The name of the run in its journal. Raises CheckpointError for a missing or damaged journal."""
        return read_header(self.directory / JOURNAL)["run"]

    @cached_property
    def journal(self) -> list[Step]:
        """The journal's steps, without steps whose line a later resume removed."""
        return list(read_steps(self.directory / JOURNAL)) if self.run else []

    @property
    def steps(self) -> list[int]:
        """The recorded steps that the journal has."""
        trained = {step.version for step in self.journal}
        return [step for step in recorded_steps(self.folder) if step in trained]

    def step(self, number: int) -> RecordedStep:
        """Return a recorded step. Raises CheckpointError, which says why the run has no such step."""
        return RecordedStep(read_step(self._find(number), self.run))

    def describe(self, number: int) -> Mapping[str, Any]:
        """Return the description of a recorded step, without its arrays. Raises CheckpointError as `step`."""
        return read_about(self._find(number), self.run)

    def _find(self, number: int) -> Path:
        """Return the path of a step's file. Raises CheckpointError."""
        recorded = recorded_steps(self.folder)
        if not recorded:
            raise CheckpointError(
                f"{self.path} has no recorded steps. Set `recover.replay=true` (with recover.mode=auto) in a run to "
                "replay its steps"
            )
        if number not in {step.version for step in self.journal}:
            raise CheckpointError(self._explain_missing(number))
        if number not in recorded:
            raise CheckpointError(
                f"step {number} of {self.path} is not recorded: its file is no longer kept, or it was trained without "
                f"recover.replay. Recorded are {_ranges(self.steps)}. Set `recover.replay_keep` higher to keep more"
            )
        return path_of(self.folder, number)

    def _explain_missing(self, number: int) -> str:
        """Return why the journal has no line of a step."""
        after, removed = removed_steps(self.folder)
        last = self.journal[-1].version if self.journal else 0
        if number in removed:
            return (
                f"step {number} of {self.path} was removed when the run resumed after step {after}, and has not been "
                f"trained again. The last step is {last}"
            )
        return f"{self.path} has no step {number}: its journal ends with step {last}. Name one of {_ranges(self.steps)}"

    def __iter__(self) -> Iterator[RecordedStep]:
        return map(self.step, self.steps)

    @property
    def metrics(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """The metrics of `metrics.jsonl`: steps and values of each."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for row in _rows(self.path / "metrics.jsonl"):
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(row["step"])
                    values.append(value)
        return {name: (np.array(steps, np.int64), np.array(values)) for name, (steps, values) in found.items()}


def open_run(path: str | Path) -> RecordedRun:
    """Open a run's directory. Raises CheckpointError if it is not one."""
    path = Path(path)
    if not (path / DIRECTORY / JOURNAL).is_file():
        raise CheckpointError(
            f"{path} has no journal ({DIRECTORY}/{JOURNAL}), so it is not the directory of a run with recover.mode=auto. "
            "Name fileroot/experiment/trial"
        )
    return RecordedRun(path)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError, RecursionError):  # a line that a crash has torn
                if isinstance(row := json.loads(line), dict) and isinstance(row.get("step"), int):
                    yield row


def _ranges(steps: list[int]) -> str:
    """Return ascending steps in words, such as `steps 1-4, 7`."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return "steps " + ", ".join("-".join(map(str, part)) for part in parts) if parts else "no steps"
