"""Assembles a checked run on its cluster, has the loop train it, and ends it as a whole."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from areal_like.backends.ray.run import RunCluster, run_cluster
from areal_like.core.config.schema import TrainerRole
from areal_like.job import Job
from areal_like.metrics.console import View, complain
from areal_like.run.attempts import train_on
from areal_like.run.directory import RunDirectory, run_directory
from areal_like.run.file_sharing import find_sharing
from areal_like.run.model_files import model_directories, scored_models
from areal_like.run.ready import Run
from areal_like.run.recording import make_record, recording
from areal_like.run.serving import open_serving
from areal_like.run.startup import start_all
from areal_like.run.startup_report import startup_report
from areal_like.run.training import train
from areal_like.runtime.watchdog import watch_loop


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

    start = partial(start_all, cluster, job, models, opened, view)
    async with (
        watch_loop(logs / "stacks.log"),
        open_serving(cluster, job, models["actor"], view, logs, start) as (serving, trainers),
    ):
        await train_on(Run(cluster, job, models, view, serving), train, trainers, opened)
