"""The journal of a run: the groups of each training step. It ensures that every group is trained in exactly one step.

`journal.jsonl` begins with a line that names the run; then it has a line for each step, in order. A step is *committed*
when a checkpoint of its version or a later one is complete. The invariants, at every moment and so after every crash:

1. Step v has a line on disk before a checkpoint of version v appears.
2. A run resumes from its newest complete checkpoint, of version v. It first truncates the journal after line v, which
removes the lines of uncommitted steps before any of these steps is repeated.
3. A checkpoint's state lists the groups that were started and not trained. A resumed run generates these groups again,
then groups that were not started, and no others.

So the groups of different lines are disjoint. Together with dropped and waiting groups, they are all started groups.
"""

import json
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, Self

from areal_like.core.checkpoint.files import append_durably, reading, size_of, write_durably
from areal_like.core.errors import CheckpointError, writing


@dataclass(frozen=True)
class Step:
    """The training step that made `version`: its groups, and the dataset row (`sample_id`) of each.

    Runs that choose prompts or baselines by earlier results also record these: the mean reward of each group, null if
    missing, the groups dropped since the last step with their mean rewards, and the values that their stream of prompts
    adds.
    """

    version: int
    groups: Sequence[int]
    samples: Sequence[int]
    rewards: Sequence[float | None] = ()
    dropped: Sequence[tuple[int, float]] = ()
    own: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the line of the journal, without fields that the run does not use."""
        values = {**vars(self), **self.own, "own": None}
        used = {name: value for name, value in values.items() if value or name in ("version", "groups", "samples")}
        return json.dumps(used) + "\n"

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the step of a line; raises ValueError or TypeError if it is none."""
        values = json.loads(line)
        known = {part.name for part in fields(cls)} - {"own"}
        return cls(
            **{name: value for name, value in values.items() if name in known},
            own={name: value for name, value in values.items() if name not in known},
        )


class Journal:
    """The journal of a run over the data with the fingerprint `data`; creates the file if it is missing.

    `earlier` is the fingerprint of the same data in earlier versions. `run` is the run's name, also in its checkpoints.
    `check` raises before a write if another process has taken the directory. Raises CheckpointError if the file is not
    a journal, or belongs to a run over other data.
    """

    def __init__(
        self, path: Path, data: str, earlier: str | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._check = path, check
        if size_of(path) is None:
            write_durably(path, json.dumps({"run": secrets.token_hex(8), "data": data}) + "\n")
        self._header = read_header(path)
        self.run = self._header["run"]
        if self._header["data"] not in (data, earlier):
            raise CheckpointError(f"{path} belongs to a run with other training prompts; choose another trial_name")

    def steps(self) -> list[Step]:
        """Return all steps with a complete line, in order. Raises CheckpointError for a damaged line."""
        return list(read_steps(self._path))

    def cut(self, version: int) -> None:
        """Keep only steps 1 to `version`; raises CheckpointError if one of them is missing or damaged."""
        with closing(read_steps(self._path)) as steps:
            kept = list(islice(steps, version))
        if [step.version for step in kept] != list(range(1, version + 1)):
            raise CheckpointError(
                f"{self._path} does not have every step up to {version}: it was modified. Restore it from a backup, or "
                "choose another trial_name"
            )
        self._check()
        write_durably(self._path, json.dumps(self._header) + "\n" + "".join(step.to_json() for step in kept))

    def put_aside(self) -> Path:
        """Rename the file to a name that no run reads, so that a new journal begins; returns that name."""
        aside = self._path.with_name(f"unused-{self.run}-{self._path.name}")
        with writing(aside):
            self._path.rename(aside)
        return aside

    def append(self, step: Step) -> None:
        """Add a step; on return, it is on disk. Raises RecordError."""
        self._check()
        append_durably(self._path, step.to_json())


def read_header(path: Path) -> dict[str, str]:
    """Return `run` and `data` of a journal; raise CheckpointError if the file is missing or not a journal."""
    if size_of(path) is None:
        raise CheckpointError(f"{path} is missing, and checkpoints are used only with their journal. {_RESTORE}")
    try:
        with reading(path), path.open("rb") as file:
            header = json.loads(file.readline().decode())
        return {name: str(header[name]) for name in ("run", "data")}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a run's journal: its first line is damaged. {_RESTORE}") from error


def count_steps(path: Path) -> int:
    """Return the number of complete lines of steps in a journal, including damaged ones; 0 if it is missing."""
    if size_of(path) is None:
        return 0
    with reading(path), path.open("rb") as file:
        return sum(line.endswith(b"\n") for line in file) - 1


_RESTORE = "Restore it from a backup, or choose another trial_name"


def read_steps(path: Path) -> Generator[Step]:
    """Yield the steps with a complete line. Raises CheckpointError for a damaged line."""
    with reading(path), path.open("rb") as file:
        next(file)
        for number, line in enumerate(file, 2):
            if line.endswith(b"\n"):  # otherwise the run ended during the write
                yield _step(line, f"{path}, line {number}")


def _step(line: bytes, place: str) -> Step:
    try:
        return Step.from_json(line.decode())
    except (ValueError, TypeError, AttributeError) as error:
        what = "it has zero bytes" if b"\0" in line else str(error)
        raise CheckpointError(f"{place} is not a step of a run: {what}. {_RESTORE}") from error


@dataclass(frozen=True)
class RunState:
    """The state after step `version`, when the servers have that version of the weights.

    `started` is the number of groups started so far. `untrained` has the ids of admitted groups that are not trained
    yet, oldest first; all other ids below `started` were trained or dropped. `missing_in_row` is the number of
    consecutive steps up to this one without a reward. `record` is the Record's own state. `started_by_adapter` has the
    groups started for each of several adapters.
    """

    version: int = 0
    started: int = 0
    untrained: tuple[int, ...] = ()
    tokens_generated: int = 0
    missing_in_row: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    started_by_adapter: Mapping[str, int] = field(default_factory=dict)

    def count_dropped(self, batch_size: int) -> int:
        """Return how many groups the algorithm did not keep."""
        return self.started - len(self.untrained) - self.version * batch_size

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the state from the `vars` of a state; raises ValueError for other values."""
        known = {part.name for part in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ValueError(f"it has fields that this version does not know: {', '.join(unknown)}")
        if missing := sorted({"version", "started", "untrained"} - values.keys()):
            raise ValueError(f"it has no {', '.join(missing)}")
        return cls(**{**values, "untrained": tuple(values["untrained"])})


def program_version() -> str:
    """Return this program's version, which a checkpoint records."""
    try:
        return version("areal-like")
    except PackageNotFoundError:
        return "unknown"
