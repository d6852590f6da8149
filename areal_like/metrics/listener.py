"""Receivers of the record of a run, which capabilities add."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.events import Event
from areal_like.metrics.samples import SampleRow


class Listener:
    """Receives everything that a run records, in order, in the thread that writes; it overrides what it needs.

    A method may raise RecordError or OSError, which is reported once under `name` and does not end the run. `files` by
    their names are listed after the last step.
    """

    name = ""
    files: Mapping[str, Path] = {}

    def describe(self, about: Mapping[str, Any]) -> None:
        """Receive the facts known before the run, as in `run.json`."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Receive metrics of a step; a step may be logged several times."""

    def events(self, events: Sequence[Event]) -> None:
        """Receive the spans that ended since the last call."""

    def samples(self, step: int, name: str | None, samples: Sequence[SampleRow]) -> None:
        """Receive samples of a training step, or of the evaluation set `name`."""

    def forget(self, step: int) -> None:
        """Void everything about `step` and later steps."""

    def close(self) -> None:
        """End with the run."""
