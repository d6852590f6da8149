"""Assembles a checked run on its cluster, has the loop train it, and ends it as a whole."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from areal_like.backends.ray.run import RunCluster, run_cluster
from areal_like.backends.ray.shared_files import FileSharing, Need
from areal_like.backends.ray.workers import WorkerGroup
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.job import Job
from areal_like.metrics.console import View, complain
from areal_like.preflight.weights import is_local
from areal_like.run.attempts import Run, train_on
from areal_like.run.directory import RunDirectory, run_directory
from areal_like.run.lost_nodes import trainer_devices
from areal_like.run.model_files import model_directories, scored_models
from areal_like.run.ready import Trainers
from areal_like.run.recording import make_record, recording
from areal_like.run.serving import open_serving
from areal_like.run.startup import start_all
from areal_like.run.startup_report import startup_report
from areal_like.runtime.watchdog import watch_loop


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


async def run(job: Job, view: View) -> None:
    """Execute a run. Afterwards nothing of it is left but its directory.

    Raises PreparationError (DirectoryTaken) before anything is started, and later an ExceptionGroup whose first leaf is
    the first failure.
    """
    config, directory = job.config, job.config.run_dir
    async with run_directory(job, view, partial(make_record, job, view)) as opened:
        with recording(opened.record):
            if opened.state.version < job.steps:
                with opened.record.doing("preparing the model"):
                    models = await model_directories(config, directory)
                logs, shared, uses_gpus = directory / "logs", directory / ".weights", job.device == "cuda"
                view.say(f"starting {job}; output of every process: {logs}")
                for line in startup_report(job):
                    view.say(line)
                async with run_cluster(
                    config.scheduler,
                    job.plan,
                    uses_gpus=uses_gpus,
                    log_dir=logs,
                    shared_dir=shared,
                    lock=opened.lock,
                    files={f"{role}.path": path.absolute() for role, path in models.items()} | scored_models(config),
                    warn=lambda text: complain([f"warning: {text}"]),
                    ports=config.cluster.ports,
                    interface=config.cluster.interface,
                    sharing=find_sharing(job, models),
                ) as cluster:
                    await _run_on(cluster, job, models, opened, view)
            opened.record.finish()


async def _run_on(
    cluster: RunCluster, job: Job, models: Mapping[TrainerRole, Path], opened: RunDirectory, view: View
) -> None:
    logs = opened.record.directory / "logs"

    async def start(tasks: asyncio.TaskGroup) -> tuple[Trainers, WorkerGroup, list[str]]:
        trainers, reference, servers, urls = await start_all(cluster, job, models, opened, view, tasks)
        return Trainers(trainers, reference), servers, urls

    async with (
        watch_loop(logs / "stacks.log"),
        open_serving(cluster, job, models["actor"], view, logs, start) as (serving, trainers),
    ):
        await train_on(Run(cluster, job, models, view, serving), trainers, opened)
