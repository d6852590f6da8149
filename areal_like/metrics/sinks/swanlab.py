"""Scalars to SwanLab."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_like.core.config.schema import SwanLabConfig
from areal_like.core.errors import RecordError


class SwanLab:
    """One run on SwanLab; with `mode: local` or `offline` it is stored in the run's directory."""

    def __init__(
        self, config: SwanLabConfig, directory: Path, experiment: str, trial: str, about: Mapping[str, Any]
    ) -> None:
        import swanlab

        try:
            self._run = swanlab.init(
                project=config.project or experiment,
                workspace=config.workspace,
                experiment_name=trial,
                config=dict(about),
                logdir=str(directory / "swanlab"),
                mode=config.mode,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise RecordError(f"stats_logger.swanlab cannot be used: {error}") from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See StatsSink; a thread of swanlab sends the scalars."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
