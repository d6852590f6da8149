"""Where a run's numbers go: one module each, behind `StatsSink`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from areal_like.config.schema import RunConfig
from areal_like.config.secrets import mask
from areal_like.metrics.sinks.mlflow import MLflow
from areal_like.metrics.sinks.scalars import Scalars
from areal_like.metrics.sinks.swanlab import SwanLab
from areal_like.metrics.sinks.tensorboard import TensorBoard
from areal_like.metrics.sinks.wandb import WandB


class StatsSink(Protocol):
    """Takes the scalars of each step; both raise RecordError where they cannot be written."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one value per name at `step`, which may come several times."""

    def close(self) -> None:
        """Close the sink: nothing follows."""


def make_sinks(config: RunConfig, directory: Path, void_from: int | None = None) -> list[StatsSink]:
    """Return the sinks that a configuration asks for; `metrics.jsonl` is always there. Raises RecordError.

    What was logged of step `void_from` and later ones is void; `metrics.jsonl` does not have it any more.
    """
    stats, experiment, trial, about = (
        config.stats_logger,
        config.experiment_name,
        config.trial_name,
        mask(config.model_dump()),
    )
    sinks: list[StatsSink] = [Scalars(directory / "metrics.jsonl")]
    if stats.tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard", void_from))
    if stats.wandb.mode != "disabled":
        sinks.append(WandB(stats.wandb, directory, experiment, trial, about))
    if stats.swanlab.mode != "disabled":
        sinks.append(SwanLab(stats.swanlab, directory, experiment, trial, about))
    if stats.mlflow.tracking_uri is not None:
        sinks.append(MLflow(stats.mlflow, experiment, trial, about))
    return sinks
