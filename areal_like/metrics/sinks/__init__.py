"""Where a run's numbers go: one module each, behind `StatsSink`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from areal_like.config.schema import StatsLoggerConfig
from areal_like.metrics.sinks.scalars import Scalars
from areal_like.metrics.sinks.tensorboard import TensorBoard


class StatsSink(Protocol):
    """Takes the scalars of each step; both raise RecordError where they cannot be written."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one value per name at `step`, which may come several times."""

    def close(self) -> None:
        """Nothing follows."""


def make_sinks(config: StatsLoggerConfig, directory: Path) -> list[StatsSink]:
    """The sinks that a configuration asks for; `metrics.jsonl` is always there."""
    sinks: list[StatsSink] = [Scalars(directory / "metrics.jsonl")]
    if config.tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard"))
    return sinks
