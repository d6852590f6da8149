"""Scalars as lines of JSON, for pandas and for the run's report."""

from collections.abc import Mapping
from pathlib import Path

from areal_like.metrics.lines import Lines


class Scalars:
    """A line `{"step": 3, "reward/mean": 0.5, ...}` for each call; values that are not finite are null."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._lines.write([{"step": step, **scalars}])

    def close(self) -> None:
        self._lines.close()
