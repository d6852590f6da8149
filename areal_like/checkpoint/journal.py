"""The journal of a run: which groups each training step took. With it, every group is trained in exactly one step.

`journal.jsonl` begins with a line that names the run; then it has a line for each step, in order. A step is *committed*
when a checkpoint of its version or a later one is complete. The invariants, at every moment and so after every crash:

1. Step v has a line on disk before a checkpoint of version v appears.
2. A run goes on from its newest whole checkpoint, of version v. It first cuts the journal behind line v, so that lines
   of steps that were not committed are gone before one of those steps is made anew.
3. A checkpoint's state has the groups that were started and not trained. Those, and then those that were not started,
   are what the run goes on with; no other group is generated.

So the groups of the lines are disjoint, and with those that were dropped or wait they are all that were started.
"""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_like.checkpoint.files import write_durably
from areal_like.errors import CheckpointError, writing


@dataclass(frozen=True)
class Step:
    """The training step that made `version`: its groups, and the dataset row (`sample_id`) of each."""

    version: int
    groups: Sequence[int]
    samples: Sequence[int]


class Journal:
    """The file of a run over the data with the fingerprint `data`, made if there is none.

    `earlier` is what earlier versions have as the fingerprint of the same data.

    `run` is the run's own name, which its checkpoints have too. Raises CheckpointError where the file is not a journal,
    or that of a run over other data.
    """

    def __init__(self, path: Path, data: str, earlier: str | None = None) -> None:
        self._path = path
        if not path.exists():
            write_durably(path, json.dumps({"run": secrets.token_hex(8), "data": data}) + "\n")
        self._header = read_header(path)
        self.run = self._header["run"]
        if self._header["data"] not in (data, earlier):
            raise CheckpointError(f"{path} is of a run over other training prompts; choose another trial_name")

    def steps(self) -> list[Step]:
        """All steps that have a whole line, in order."""
        return list(_steps(self._path))

    def cut(self, version: int) -> None:
        """Keep steps 1 to `version` alone; raises CheckpointError where one of them is not there."""
        kept = [step for step in self.steps() if step.version <= version]
        if [step.version for step in kept] != list(range(1, version + 1)):
            raise CheckpointError(f"{self._path} does not have every step up to {version}: it was changed")
        lines = [self._header, *map(vars, kept)]
        write_durably(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    def append(self, step: Step) -> None:
        """Add a step; it is on disk when this returns. Raises RecordError."""
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(vars(step)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_header(path: Path) -> dict[str, str]:
    """`run` and `data` of a journal; raises CheckpointError where it is not one."""
    try:
        with path.open() as file:
            header = json.loads(file.readline())
        return {name: str(header[name]) for name in ("run", "data")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a run's journal; choose another trial_name") from error


def _steps(path: Path) -> Iterator[Step]:
    with path.open() as file:
        next(file)
        for line in file:
            if line.endswith("\n"):  # else the run ended while it wrote
                yield Step(**json.loads(line))
