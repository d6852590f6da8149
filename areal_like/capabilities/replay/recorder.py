"""Records each training step beside the loop; its file is written while the servers receive the new weights."""

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from areal_like.backends.megatron.options import row_multiple
from areal_like.capabilities.replay.arrays import Arrays, flatten, to_arrays
from areal_like.capabilities.replay.checkpoint_files import note_checkpoints
from areal_like.capabilities.replay.digests import digest
from areal_like.capabilities.replay.rank import describe_state
from areal_like.capabilities.replay.schema import ReplayKeys
from areal_like.capabilities.replay.step_file import (
    FOLDER,
    INPUTS,
    SCHEDULE,
    TRAJECTORIES,
    prune,
    remove_after,
    state_arrays,
    write_step,
)
from areal_like.capability import Started
from areal_like.core.algorithms.types import Experience
from areal_like.core.checkpoint.files import call_disk
from areal_like.core.checkpoint.journal import program_version, read_header
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL
from areal_like.core.columns import all_columns
from areal_like.core.config.keys import with_keys
from areal_like.core.hooks import Hook, Share, TrainingStep
from areal_like.core.trainer.packing import alignment_of, ranks_meet, schedule_batch
from areal_like.core.types import Batch
from areal_like.job import Job

_FOLLOW = {"behaviour_logprobs", "on_policy", "rewards", "groups", "samples", "truncated"}  # beside columns
PHASE = "recording"  # the name in `seconds/recording`


class Recorder(Hook):
    """Writes `recover/replay/step-N.safetensors` for each step, at most `keep` of them."""

    def __init__(self, started: Started, keep: int) -> None:
        self._started, self._keep = started, keep
        directory = started.job.config.run_dir / DIRECTORY
        self._directory, self._folder = directory, directory / FOLDER
        self._run = ""
        self._writing: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None  # checksums of checkpoints, which may take longer than a step

    async def start(self) -> None:
        """Remove the files of steps that this resume discards."""
        self._run = (await call_disk(read_header, self._directory / JOURNAL))["run"]
        await call_disk(remove_after, self._folder, self._started.resumed or 0, self._run)

    async def after_training(self, step: TrainingStep) -> None:
        """Start measuring the ranks' state and writing the step."""
        self._writing = asyncio.create_task(self._write(step))

    async def after_publish(self, step: TrainingStep) -> None:
        """Wait until the step's file is on disk, which the journal's line needs."""
        with self._started.record.phase(PHASE):
            if self._writing is not None:
                await self._writing
        if self._noting is None or self._noting.done():
            if self._noting is not None:
                self._noting.result()
            self._noting = asyncio.create_task(call_disk(note_checkpoints, self._directory))

    async def _write(self, step: TrainingStep) -> None:
        states, seeds = await measure(self._started.trainers)  # before the next step's calls, in the ranks' order
        arrays, described = await asyncio.to_thread(describe_step, self._started.job, step)
        about = {"step": step.done, "run": self._run, "program": program_version(), "seeds": seeds}
        await call_disk(write_step, self._folder, arrays | state_arrays(states), described | about)
        await call_disk(prune, self._folder, self._keep)


def make_recorder(started: Started) -> Recorder | None:
    """Return the recorder of a run, None without `recover.replay`."""
    recover = started.job.config.recover
    keys = with_keys(recover, ReplayKeys)
    return Recorder(started, keys.replay_keep) if keys.replay and recover.mode != "off" else None


async def measure(trainers: Mapping[Any, Any]) -> tuple[dict[str, list[Any]], dict[str, list[int]]]:
    """Return the digests of each trained role's state, rank by rank, and the ranks' seeds."""
    states: dict[str, list[Any]] = {}
    seeds: dict[str, list[int]] = {}
    for role, trainer in trainers.items():
        ranks = await trainer.apply(describe_state, phase=PHASE)
        states[role] = [rank["parts"] for rank in ranks]
        seeds[role] = [rank["seed"] for rank in ranks]
    return states, seeds


def describe_step(job: Job, step: TrainingStep) -> tuple[Arrays, dict[str, Any]]:
    """Return a step's arrays and its description, without the state of the ranks."""
    own, texts = to_arrays(step.trajectories)
    arrays = {TRAJECTORIES + name: array for name, array in own.items()}
    inputs, batches = dict[str, Any](), dict[str, Any]()
    for name, share in step.shares.items():
        key = f"{name}/" if name else ""
        if share.experience is not None:
            values, inputs[name] = describe_inputs(share.experience)
            arrays |= {INPUTS + key + each: array for each, array in values.items()}
        batches[name] = [describe_batch(batch) for batch in share.batches]
        for number, batch in enumerate(share.batches):
            arrays |= {f"{SCHEDULE}{key}{number}/{part}": array for part, array in schedule_arrays(job, batch).items()}
    about = {
        "texts": texts,
        "statistics": {f"{name}/{tag}" if name else tag: value for name, tag, value in _statistics(step.shares)},
        "groups": list(dict.fromkeys(item.group_id for item in step.trajectories)),
        "samples_per_group": job.config.gconfig.n_samples,
        "has_workflow": bool(job.config.workflows),
        "input_digests": inputs,
        "batch_digests": batches,
        "layout": job.plan.engine("actor").text,
        "layouts": {role: job.plan.engine(role).text for role in job.config.roles},
        "device": job.device,
        "total_steps": job.steps,
        "seed": job.config.seed,
    }
    return arrays, about


def _statistics(shares: Mapping[str, Share]) -> list[tuple[str, str, float]]:
    return [(name, tag, float(value)) for name, share in shares.items() for tag, value in share.stats.items()]


def describe_inputs(experience: Experience) -> tuple[Arrays, dict[str, list[int]]]:
    """Return the algorithm's inputs that do not follow from the trajectories, and the digests of all inputs."""
    own = {each.name: getattr(experience, each.name) for each in fields(experience)}
    arrays = {name: value for name, value in own.items() if isinstance(value, np.ndarray)}
    fields_of_batch = {name: flatten(name, each) for name, each in experience.batch.fields.items()}
    arrays |= {name: array for parts in fields_of_batch.values() for name, array in parts.items()}
    values = {name: array for name, array in arrays.items() if name.partition(".")[0] not in {*_FOLLOW, *all_columns()}}
    return values, {name: list(digest(array)) for name, array in arrays.items()}


def describe_batch(batch: Batch) -> dict[str, list[int]]:
    """Return the digests of a mini-batch's arrays."""
    arrays = {"lengths": batch.lengths, "tokens": batch.tokens}
    for name, values in batch.fields.items():
        arrays |= flatten(name, values)
    return {name: list(digest(array)) for name, array in arrays.items()}


def schedule_arrays(job: Job, batch: Batch) -> Arrays:
    """Return the micro-batch schedule: sequences of the mini-batch, and sequences in each micro-batch of each rank.

    It is empty with images, whose schedule needs the model.
    """
    if batch.images is not None:
        return {}
    section, plan = job.config.actor, job.plan.engine("actor")
    overrides = section.megatron.override_transformer_config
    is_megatron = plan.backend == "megatron"
    rows = row_multiple(overrides) or 1 if is_megatron else 1
    at_once = overrides.get("microbatch_group_size_per_vp_stage") or plan.sizes.pp
    schedule, _ = schedule_batch(
        batch,
        section.mb_spec,
        dp=plan.sizes.dp,
        alignment=alignment_of(plan.backend, plan.sizes, rows),
        multiple=at_once if is_megatron and plan.sizes.vpp > 1 else 1,
        model=job.models.get("actor"),
        meet=ranks_meet(plan.backend, plan.sizes),
    )
    sequences = [sequence for rank in schedule for part in rank for sequence in part]
    counts = [[len(part) for part in rank] for rank in schedule]
    return {"sequences": np.array(sequences, np.int32), "counts": np.array(counts, np.int32)}
