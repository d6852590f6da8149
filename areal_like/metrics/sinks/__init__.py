"""Destinations of a run's metrics: one module each, behind `StatsSink`."""

from pathlib import Path

from areal_like.core.config.keys import mask
from areal_like.core.config.schema import RunConfig
from areal_like.metrics.scalars import StatsSink
from areal_like.metrics.sinks.mlflow import MLflow
from areal_like.metrics.sinks.scalars import Scalars
from areal_like.metrics.sinks.swanlab import SwanLab
from areal_like.metrics.sinks.tensorboard import TensorBoard
from areal_like.metrics.sinks.wandb import WandB


def make_sinks(config: RunConfig, directory: Path, void_from: int | None = None) -> list[StatsSink]:
    """Return the sinks of a configuration; `metrics.jsonl` is always one of them. Raises RecordError.

    Logged values of step `void_from` and later steps are void, and already removed from `metrics.jsonl`.
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
