"""Scalars to Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.core.config.schema import WandBConfig
from areal_like.core.errors import RecordError


class WandB:
    """One run on Weights & Biases; with `mode: offline` it stays in the run's directory until `wandb sync` sends it."""

    def __init__(
        self, config: WandBConfig, directory: Path, experiment: str, trial: str, about: Mapping[str, Any]
    ) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=config.project or experiment,
                entity=config.entity,
                group=config.group,
                name=trial,
                dir=str(directory),
                config=dict(about),
                mode=config.mode,
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, OSError) as error:
            raise RecordError(f"Weights & Biases (stats_logger.wandb) cannot be used: {error}") from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See StatsSink; a process of wandb sends the scalars."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
