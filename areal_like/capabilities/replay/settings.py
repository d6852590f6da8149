"""The settings of a replay: the run's settings, with the user's changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from areal_like.capabilities.replay.reader import RecordedRun
from areal_like.core.checkpoint.journal import program_version
from areal_like.core.config.findings import ConfigError
from areal_like.core.config.keys import is_below
from areal_like.core.config.load import load
from areal_like.core.config.schema import RunConfig
from areal_like.core.errors import CheckpointError
from areal_like.job import Job
from areal_like.preflight import preflight
from areal_like.preflight.machine import CONFIG_FILE
from areal_like.preflight.resume import MAY_CHANGE

_USED = (  # sections and keys that a replay reads
    *("actor", "critic", "ref", "adapters", "allocation_mode", "cluster", "scheduler", "device"),
    *("algorithm", "gconfig.temperature"),
)
_SERVED = (  # that an evaluation reads too
    *(f"rollout.{key}" for key in ("backend", "dtype", "sharing", "startup_timeout_s", "request_timeout_s")),
    *("sglang", "weight_update", "valid_dataset"),
    *(f"evaluator.{key}" for key in ("datasets", "n_samples", "temperature", "top_p", "top_k", "max_new_tokens")),
)
_ELSEWHERE = ("recover.mode=off", "recover.replay=false", "stats_logger.console=false")


def may_change(override: str) -> bool:
    """Return whether an override changes a key that may change within a run: the key does not change the training."""
    key = override.partition("=")[0]
    return any(is_below([key], allowed) for allowed in MAY_CHANGE)


def check_overrides(overrides: Sequence[str], *, evaluates: bool = False) -> None:
    """Raise CheckpointError for an override that a replay would ignore: without evaluation it has no servers."""
    used = (*_USED, *_SERVED) if evaluates else _USED
    for text in overrides:
        key = text.partition("=")[0]
        if any(is_below([key], section) for section in used):
            continue
        needs = " without --evaluate" if any(is_below([key], section) for section in _SERVED) else ""
        raise CheckpointError(
            f"{key} does not change a replay{needs}, which trains recorded trajectories without servers, prompts and "
            f"rewards. Override keys of {', '.join(used)}"
        )


def is_in_place(config: RunConfig) -> bool:
    """Return whether requests continue in place when weights are updated, with keys and values of older weights."""
    return config.weight_update.requests == "in_place"


def read_config(run: RecordedRun) -> Mapping[str, Any]:
    """Return the run's configuration. Raises CheckpointError if it is missing or damaged."""
    path = run.path / CONFIG_FILE
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping")
        return values
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Restore it from a backup") from error


def make_job(run: RecordedRun, overrides: Sequence[str], scratch: Path, total_steps: int) -> Job:
    """Return the run's job with overrides; its directory is `scratch`. Raises ConfigError with all findings."""
    read_config(run)
    place = f"cluster.fileroot={scratch}"
    loaded = load(run.path / CONFIG_FILE, [*overrides, *_ELSEWHERE, place])
    checked = preflight(loaded, dry_run=True)
    if checked.job is None:
        raise ConfigError(checked.findings)
    job = replace(checked.job, steps=total_steps)
    return replace(job, adapters=[replace(part, steps=total_steps) for part in job.adapters])


def same_layout(steps: Sequence[Mapping[str, Any]], job: Job) -> bool:
    """Return whether steps, of these descriptions, were trained in the job's layout, on its device."""
    return all(about["layouts"] == _layouts(job) and about["device"] == job.device for about in steps)


def compare_settings(steps: Sequence[Mapping[str, Any]], job: Job) -> list[str]:
    """Return warnings about recorded steps that this code, layout or device cannot compute to the same bits."""
    said = []
    for name, own in (("program", program_version()), ("layouts", _layouts(job)), ("device", job.device)):
        others = {json.dumps(about[name]): about["step"] for about in steps if about[name] != own}
        said += [_warning(name, json.loads(other), own, step) for other, step in others.items()]
    return said


def _layouts(job: Job) -> dict[str, str]:
    return {role: job.plan.engine(role).text for role in job.config.roles}


def _warning(name: str, recorded: Any, own: Any, step: int) -> str:
    if name == "program":
        fact = f"step {step} was trained by version {recorded} of areal-like, and this is {own}"
        return f"{fact}. Install {recorded} for equal bits"
    if name == "device":
        return f"step {step} was trained on {recorded}, and is replayed on {own}"
    was, now = (", ".join(f"{role} {text}" for role, text in each.items()) for each in (recorded, own))
    return f"step {step} was trained as {was}, and is replayed as {now}"
