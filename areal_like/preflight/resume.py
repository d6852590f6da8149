"""A run's directory that exists: may this command go on with it, and has what must not change stayed as it was."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from allocation.diagnostics import Finding
from areal_like.checkpoint.journal import read_header
from areal_like.checkpoint.store import DIRECTORY, INTERRUPTED, JOURNAL, newest
from areal_like.config.findings import finding
from areal_like.config.keys import is_below
from areal_like.config.schema import RunConfig
from areal_like.data.dataset import fingerprint, training_steps
from areal_like.errors import CheckpointError
from areal_like.preflight.machine import CONFIG_FILE
from areal_like.types import Prompt

# Sections and keys whose values may change within a run, as may every `..._timeout_s`.
MAY_CHANGE = (
    *("allocation_mode", "cluster", "scheduler", "device", "total_train_epochs", "total_train_steps"),
    *(f"{role}.{key}" for role in ("actor", "ref", "critic") for key in ("backend", "mb_spec", "megatron", "env_vars")),
    *("actor.offload", "ref.offload", "critic.offload"),
    *("actor.optimizer.max_skipped_steps", "critic.optimizer.max_skipped_steps"),
    *("rollout", "sglang", "weight_update", "reward.workers", "reward.max_missing_batches", "reward.model.backend"),
    *("valid_dataset", "evaluator", "saver", "recover", "stats_logger"),
)
_LIMITS = "timeout_s"
_MUST_STAY = (  # of megatron
    *("use_dist_checkpointing", "dist_checkpointing_path"),  # of a reference, which is loaded anew
    "use_distributed_optimizer",  # each form of its state is its own
)


def check_resume(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """What keeps a command from going on with the run in its directory, if there is one."""
    path, help = config.run_dir, "choose another trial_name"
    if config.recover.mode == "off" or not (path / CONFIG_FILE).exists():
        return
    directory = path / DIRECTORY
    if not (directory / JOURNAL).exists():
        message = f"{path} holds the results of a run that wrote no checkpoints (recover.mode: off)"
        yield finding("RUN-DIRECTORY", "trial_name", message, help)
        return
    try:
        found, _ = newest(directory)
        data = read_header(directory / JOURNAL)["data"]
        before = yaml.safe_load((path / CONFIG_FILE).read_text())
    except (CheckpointError, OSError, ValueError, yaml.YAMLError) as error:
        yield finding("RUN-RESUME", "trial_name", f"{path} cannot be gone on with: {error}", help)
        return
    if prompts and data != fingerprint(prompts):
        message = f"{path} is of a run over other training prompts"
        yield finding("RUN-RESUME", "train_dataset", message, f"give it the same data, or {help}")
    yield from _changes(_flat(before), _flat(config.model_dump()), path)
    if found and prompts:
        yield from _ended(config, directory, found.state.version, training_steps(config, len(prompts)))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    for key, value in now.items():
        stays = key.endswith(_MUST_STAY)
        may = key.endswith(_LIMITS) or (not stays and any(is_below([key], allowed) for allowed in MAY_CHANGE))
        if not may and key in before and before[key] != value:
            message = f"{_text(value)} is not what the run in {path} began with, {_text(before[key])}"
            yield finding("RUN-RESUME", key, message, f"write {key}={_text(before[key])}, or choose another trial_name")


def _ended(config: RunConfig, directory: Path, version: int, steps: int) -> Iterator[Finding]:
    """A run that has nothing left to do, or that `fault` leaves alone."""
    if version >= steps and (directory.parent / "summary.json").exists():
        message = f"{directory.parent} has all of its {steps} steps"
        yield finding("RUN-RESUME", "recover.mode", message, "raise total_train_steps, or choose another trial_name")
    elif config.recover.mode == "fault" and (directory / INTERRUPTED).exists():
        message = f"the run in {directory.parent} was interrupted by hand, which is not a failure"
        yield finding("RUN-RESUME", "recover.mode", message, "write recover.mode=auto to go on with it")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
