"""Checks of an existing run directory: whether this command may resume it, and whether fixed keys are unchanged."""

import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from allocation.diagnostics import Finding, Severity
from allocation.plan import Plan
from areal_like.backends.megatron.distributed import CONFIG
from areal_like.core.checkpoint.journal import read_header
from areal_like.core.checkpoint.store import DIRECTORY, INTERRUPTED, JOURNAL, RESTART, lost_by_restart, newest
from areal_like.core.config.findings import finding
from areal_like.core.config.keys import annotation_of, is_below, mask, members, section_of, value_at
from areal_like.core.config.schema import EngineConfig, RunConfig
from areal_like.core.errors import CheckpointError
from areal_like.core.types import Prompt
from areal_like.data.dataset import fingerprints, training_steps
from areal_like.metrics.names import SUMMARY_FILE
from areal_like.preflight.layout import find_plan
from areal_like.preflight.machine import CONFIG_FILE
from areal_like.preflight.view import Models
from areal_like.runtime.owner import is_taken

# Sections and keys whose values may change within a run, as may every `..._timeout_s`.
MAY_CHANGE = (
    *("allocation_mode", "cluster", "scheduler", "device", "total_train_epochs", "total_train_steps"),
    *(f"{role}.{key}" for role in ("actor", "ref", "critic") for key in ("backend", "mb_spec", "megatron", "env_vars")),
    *(f"{role}.{key}" for role in ("actor", "ref", "critic") for key in ("offload", "fsdp.gradient_checkpointing")),
    *("actor.optimizer.max_skipped_steps", "critic.optimizer.max_skipped_steps"),
    *(
        "rollout",
        "sglang",
        "weight_update",
        "reward.workers",
        "reward.memory_mb",
        "reward.max_missing_batches",
        "reward.model.backend",
        *(f"reward.judge.{key}" for key in ("url", "backend", "token_variable", "requests", "retries")),
        "reward.judge.cache_size",
        "teacher.backend",
        "teacher.requests",
    ),
    *("valid_dataset", "evaluator", "saver", "recover", "stats_logger"),
)
_LIMITS = "timeout_s"
_FROM_ACTOR = {*EngineConfig.model_fields, "optimizer"} - {"backend", "path"}  # of a role that has none of its own
_MUST_STAY = (  # of megatron
    *("use_dist_checkpointing", "dist_checkpointing_path"),  # of a reference, which is loaded anew
    "use_distributed_optimizer",  # each form of its state is its own
    "train_mtp_layers",
)


def find_layouts(
    config: RunConfig, models: Models, plan: Plan | None, image_share: float = 0.0
) -> tuple[list[tuple[RunConfig, Plan]], list[Finding]]:
    """Return configuration and plan of each of `recover.layouts`, and findings about layouts that can never be used."""
    layouts, findings = list[tuple[RunConfig, Plan]](), list[Finding]()
    if plan is None or config.host_timeout_s is None or not config.trainer_restarts:
        return layouts, findings
    for text in config.recover.layouts:
        section: dict[str, Any] = {"allocation_mode": text}
        if config.allocation_mode is None:
            section = {"actor": config.actor.model_copy(update={"backend": text})}
        changed = config.model_copy(update=section)
        other, found = find_plan(changed, models["actor"], models, image_share)
        error = next((each.message for each in found if each.severity is Severity.ERROR), None)
        if problem := error or (other and _never_used(plan, other)):
            help = "write a smaller layout of the same servers and backend, such as megatron:d1, or leave it out"
            findings.append(finding("RUN-RECOVER-LAYOUT", "recover.layouts", f"{text!r}: {problem}", help))
        elif other:
            layouts.append((changed, other))
    return layouts, findings


def _never_used(plan: Plan, other: Plan) -> str | None:
    """Return why a run with a plan can never continue with the other one, if that is so."""
    if plan.engine("rollout").text != other.engine("rollout").text:
        return "its servers differ, but the servers keep running while the trainer restarts"
    if plan.engine("actor").backend != other.engine("actor").backend:
        return f"{other.engine('actor').backend} cannot load checkpoints of {plan.engine('actor').backend}"
    here, there = (
        {device for engine in of.engines if engine.kind == "trainer" for device in engine.devices}
        for of in (plan, other)
    )
    if any(set(of.engine("rollout").devices) & used for of, used in ((plan, here), (other, there))):
        return "trainer and servers share GPUs, so a lost host is one of both"
    return None if len(there) < len(here) else f"its trainer needs {len(there)} GPUs, the present one has {len(here)}"


def check_resume(
    config: RunConfig, prompts: Sequence[Prompt], plan: Plan | None, steps: int | None = None
) -> Iterator[Finding]:
    """Check that a command can resume the run in its directory, if there is one, which has that many steps in all."""
    path, help = config.run_dir, "choose another trial_name"
    if config.recover.mode == "off" or not (path / CONFIG_FILE).exists():
        return
    directory = path / DIRECTORY
    if not (directory / JOURNAL).exists():
        message = f"{path} holds the results of a run that wrote no checkpoints (recover.mode: off)"
        yield finding("RUN-RESUME-CHECKPOINT", "trial_name", message, help)
        return
    try:
        found, incomplete = newest(directory)
        data = read_header(directory / JOURNAL)["data"]
        before = yaml.safe_load((path / CONFIG_FILE).read_text())
        lost = "" if found or config.recover.restart else lost_by_restart(directory, incomplete)
    except (CheckpointError, OSError, ValueError, yaml.YAMLError) as error:
        yield finding("RUN-RESUME-CHECKPOINT", "trial_name", f"the run in {path} cannot be resumed: {error}", help)
        return
    if lost and not is_taken(directory):
        yield finding("RUN-RESUME-CHECKPOINT", "recover.restart", lost, f"{RESTART}, or {help}")
    if prompts and data not in fingerprints(prompts):
        message = f"the run in {path} has other training prompts"
        yield finding("RUN-RESUME-CHANGED", "train_dataset", message, f"give it the same data, or {help}")
    yield from _changes(mask(before), mask(config.model_dump(mode="json")), path)
    if found and plan is not None:
        yield from _backends(config, plan, found.path, before)
    if found and prompts:
        yield from _check_ended(config, directory, found.state.version, steps or training_steps(config, len(prompts)))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    for key, old, new in _different(_with_actors(before, now), _with_actors(now, before)):
        stays = key.endswith(_MUST_STAY)
        may = key.endswith(_LIMITS) or (not stays and any(is_below([key], allowed) for allowed in MAY_CHANGE))
        if not may:
            message = f"the run in {path} started with {_text(old)}, not {_text(new)}"
            yield finding("RUN-RESUME-CHANGED", key, message, f"{_back(key, old, path)}, or choose another trial_name")


def _with_actors(values: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values with the actor's settings in a role's section, where the `other` ones have them there."""
    filled = dict(values)
    for role in ("ref", "critic"):
        if (own := values.get(role)) and (others := other.get(role)):
            shared = [name for name in _FROM_ACTOR if own.get(name) is None and others.get(name) is not None]
            filled[role] = {**own, **{name: values["actor"].get(name) for name in shared}}
    return filled


def _different(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, with both; a section that one side lacks is one key, and None there."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        section = section_of(annotation_of(key)) if key else RunConfig
        if section is not None:  # a key of a newer version had its default, and one of an older version is gone
            defaults = section.model_construct().model_dump(mode="json")
            before = {name: before.get(name, defaults.get(name)) for name in now}
        for name in {**before, **now}:
            yield from _different(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now


def _back(key: str, value: Any, path: Path) -> str:
    """Return how to have the value that a run began with."""
    if isinstance(value, Mapping):
        return f"write it as in {path / CONFIG_FILE}"
    if value is None and types.NoneType not in members(annotation_of(key)):
        return "leave it out"
    return f"write {key}={_text(value)}"


def _backends(config: RunConfig, plan: Plan, checkpoint: Path, before: Mapping[str, Any]) -> Iterator[Finding]:
    """Find roles whose checkpoint is of the other training backend; a role without a layout has the actor's."""
    for role in [role for role, section in config.roles.items() if config.allocation_mode or section.backend]:
        path, now = checkpoint / role, plan.engine(role).backend
        backend = "megatron" if (path / CONFIG).exists() else "fsdp"
        if path.exists() and now != backend:
            key = "allocation_mode" if config.allocation_mode else f"{role}.backend"
            old = value_at(before, key)
            message = f"{path} is a {backend} checkpoint, which {now} cannot read"
            again = f"write {key}={old}" if old else f"give the layout as in {checkpoint.parents[1] / CONFIG_FILE}"
            yield finding("RUN-RESUME-CHANGED", key, message, f"{again}, or choose another trial_name")


def _check_ended(config: RunConfig, directory: Path, version: int, steps: int) -> Iterator[Finding]:
    """Check that the run has steps left, and that `recover.mode=fault` applies to how it ended."""
    ended, only_failures = (directory.parent / SUMMARY_FILE).exists(), config.recover.mode == "fault"
    if version >= steps and ended:
        message = f"the run in {directory.parent} has finished all {steps} steps"
        longer = "raise total_train_steps" + (" and write recover.mode=auto" if only_failures else "")
        yield finding("RUN-RESUME-ENDED", "recover.mode", message, f"{longer}, or choose another trial_name")
    elif only_failures and (ended or (directory / INTERRUPTED).exists()):
        how = "finished" if ended else "was interrupted by hand"
        message = f"recover.mode=fault resumes failed runs only; the run in {directory.parent} {how}"
        yield finding("RUN-RESUME-ENDED", "recover.mode", message, "write recover.mode=auto to resume it")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a section"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
