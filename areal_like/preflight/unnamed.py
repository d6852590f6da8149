"""Runs without a name: the same command finds the one that it left unfinished."""

from pathlib import Path
from typing import Any

import yaml

from areal_like.core.checkpoint.store import DIRECTORY, INTERRUPTED, newest
from areal_like.core.config.keys import mask
from areal_like.core.config.load import THE_TIME, LoadedConfig
from areal_like.core.config.schema import RunConfig
from areal_like.core.errors import CheckpointError
from areal_like.metrics.names import SUMMARY_FILE
from areal_like.preflight.machine import CONFIG_FILE
from areal_like.runtime.owner import is_taken


def name_unfinished(loaded: LoadedConfig) -> RunConfig:
    """Return the configuration with the name of the newest unfinished run that had the same one.

    Applies where `trial_name` is empty and `recover.mode` is set. The run must have a complete checkpoint, and no
    process may own its directory. Without such a run the name stays the start time.
    """
    config = loaded.config
    if config.recover.mode == "off" or loaded.origins.place_of("trial_name") != THE_TIME:
        return config
    now = _without_name(mask(config.model_dump(mode="json")))
    for path in sorted(config.run_dir.parent.glob("*"), key=lambda path: path.name, reverse=True):
        if _is_unfinished(path, only_failures=config.recover.mode == "fault") and _configuration(path) == now:
            return config.model_copy(update={"trial_name": path.name})
    return config


def _is_unfinished(path: Path, *, only_failures: bool) -> bool:
    directory = path / DIRECTORY
    if not directory.is_dir() or (path / SUMMARY_FILE).exists():
        return False
    if only_failures and (directory / INTERRUPTED).exists():
        return False
    try:
        return not is_taken(directory) and newest(directory)[0] is not None
    except (CheckpointError, OSError, ValueError):
        return False


def _configuration(path: Path) -> Any:
    """Return the configuration that a run wrote, without its name; None if it cannot be read."""
    try:
        return _without_name(yaml.safe_load((path / CONFIG_FILE).read_text()))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _without_name(values: Any) -> Any:
    return {key: value for key, value in values.items() if key != "trial_name"} if isinstance(values, dict) else None
