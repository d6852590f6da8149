"""Files that the nodes of a run have to share, or receive from the controller."""

from collections.abc import Mapping
from pathlib import Path

from areal_like.backends.ray.shared_files import FileSharing, Need
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.job import Job
from areal_like.preflight.weights import is_local
from areal_like.run.lost_nodes import trainer_devices


def find_sharing(job: Job, models: Mapping[TrainerRole, Path]) -> FileSharing:
    """Return which nodes have to see the files that the controller writes, and the models that others receive."""
    config, update = job.config, job.config.weight_update
    files = None
    if update.transport not in ("collective", "ipc"):
        setting = "weight_update.adapters=true" if update.adapters else f"weight_update.mode={update.mode}"
        files = Need(setting, "set weight_update.mode=collective")
    everywhere = None if update.transport == "deltas" and update.url else files  # servers download them
    need = files or _trainers_need(config)
    devices = dict.fromkeys(trainer_devices(job), need) if need else {}
    sent = {path for role, path in models.items() if _is_made_or_downloaded(config, role)}
    if config.tokenizer_path and job.tokenizer.directory and not is_local(config.tokenizer_path):
        sent.add(job.tokenizer.directory)
    return FileSharing(everywhere, devices, sorted(sent))


def _trainers_need(config: RunConfig) -> Need | None:
    if config.recover.mode != "off":
        return Need(f"recover.mode={config.recover.mode}", "set recover.mode=off")
    if (ref := config.ref) is None:
        return None
    if ref.update_every_steps is not None:
        return Need(f"ref.update_every_steps={ref.update_every_steps}", "set ref.update_every_steps=null")
    return Need("ref with warm_start", "set ref.path") if config.warm_start and ref.path is None else None


def _is_made_or_downloaded(config: RunConfig, role: TrainerRole) -> bool:
    path = config.roles[role].path or config.actor.path
    return path is None or not is_local(str(path))
