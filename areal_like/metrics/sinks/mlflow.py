"""Scalars to MLflow."""

import re
from collections.abc import Mapping
from typing import Any

from areal_like.core.config.keys import mask_urls
from areal_like.core.config.schema import MLflowConfig
from areal_like.core.errors import RecordError

_REFUSED = re.compile(r"[^/\w.\- ]")  # mlflow/utils/validation.py; one such name loses all metrics of a step


class MLflow:
    """One run of an MLflow experiment. In names, `_at_` replaces `@`, and `_` other characters that MLflow rejects."""

    def __init__(self, config: MLflowConfig, experiment: str, trial: str, about: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        try:
            mlflow.set_tracking_uri(config.tracking_uri)
            mlflow.set_experiment(config.experiment_name or experiment)
            mlflow.start_run(run_name=trial)
            mlflow.log_dict(dict(about), "config.json")
        except (mlflow.exceptions.MlflowException, OSError) as error:
            raise RecordError(f"MLflow (stats_logger.mlflow) cannot be used: {mask_urls(str(error))}") from None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See StatsSink; a thread of mlflow sends the scalars."""
        named = {_REFUSED.sub("_", name.replace("@", "_at_")): value for name, value in scalars.items()}
        self._mlflow.log_metrics(named, step=step, synchronous=False)

    def close(self) -> None:
        self._mlflow.end_run()
