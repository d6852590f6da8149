"""The state of a run after a training step: everything that a resumed run needs except its trainers' weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self


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
