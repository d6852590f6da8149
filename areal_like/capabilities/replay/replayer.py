"""Computes recorded steps again: the run's trainers without servers, from its nearest checkpoint.

The steps go through the loop's own `train_step`, and their results are described as the recorder describes them, so a
replayed step is compared with the recorded one as two recorded steps are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from areal_like.backends.ray.run import RunCluster, run_cluster
from areal_like.capabilities.replay.checkpoint_files import check_checkpoint
from areal_like.capabilities.replay.reader import RecordedRun
from areal_like.capabilities.replay.recorder import describe_step, measure
from areal_like.capabilities.replay.step_file import StepFile, state_arrays
from areal_like.core.algorithms.batch import batch_of
from areal_like.core.checkpoint.store import Checkpoint, checkpoints, read
from areal_like.core.config.schema import TrainerRole
from areal_like.core.errors import CheckpointError
from areal_like.core.hooks import Share, TrainingStep
from areal_like.core.loop.policies import Policy, split
from areal_like.core.loop.step import Models, mean_of_shares, train_step
from areal_like.core.trainer.remote import Reference, Trainer
from areal_like.core.types import Floats, Trajectory
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.metrics.record import Record
from areal_like.run.model_files import model_directories
from areal_like.run.startup import StartupTimes, ready_trainers

type Keep = Callable[[Trajectory, int], bool]  # whether a trajectory is trained at a version


class NoRecord:
    """The parts of a Record that training needs, without files."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the body."""
        yield

    doing = phase


@dataclass(frozen=True)
class ReplayStart:
    """Where a replay starts: a checkpoint, or a checkpoint of the trainers alone at `path`, or the run's beginning."""

    version: int = 0
    checkpoint: Checkpoint | None = None
    damaged: Sequence[str] = ()  # the problems of nearer checkpoints

    def __str__(self) -> str:
        return str(self.checkpoint.path) if self.checkpoint else "the beginning of the run"


def find_place(run: RecordedRun, step: int) -> ReplayStart:
    """Return the nearest place before a step from which every step is recorded. Raises CheckpointError."""
    damaged: list[str] = []
    for path in checkpoints(run.directory):
        if int(path.name.removeprefix("step-")) >= step:
            continue
        try:
            found = read(path, run.run)
            check_checkpoint(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return _complete(run, ReplayStart(found.state.version, found, damaged), step)
    return _complete(run, ReplayStart(damaged=damaged), step)


def _complete(run: RecordedRun, place: ReplayStart, step: int) -> ReplayStart:
    """Return a place if every step between it and a step is recorded."""
    lacking = [each for each in range(place.version + 1, step) if each not in run.steps]
    if lacking:
        reason = "".join(f"{problem}. " for problem in place.damaged)
        raise CheckpointError(
            f"{reason}step {step} cannot be computed: the nearest checkpoint before it is {place}, and "
            f"{len(lacking)} steps in between are not recorded (the first is step {lacking[0]}). Set "
            "`recover.replay_keep` and `recover.keep` higher in the next run; here, choose a step after the first of "
            f"steps {run.steps[0] if run.steps else 'none'} with a checkpoint before it"
        )
    return place


@dataclass(eq=False)
class Replay:
    """Started trainers at a version of the run; `model` is the actor's, for servers on the same `cluster`."""

    cluster: RunCluster
    job: Job
    model: Path
    policies: Mapping[str, Policy]
    models: Models
    trainers: Mapping[TrainerRole, Trainer]
    reference: Reference | None
    version: int
    keep: Keep = lambda item, version: True
    _baselines: dict[int, float] = field(default_factory=dict)

    async def step(self, recorded: StepFile) -> StepFile:
        """Train a recorded step; return the file that the recorder would have written."""
        trajectories = [item for item in recorded.trajectories() if self.keep(item, self.version)]
        shares = {name: Share(own) for name, own in split(list(trajectories), self.policies).items()}
        step = TrainingStep(self.version, trajectories, shares)
        for name, share in shares.items():
            models = replace(self.models, baselines=_baselines(recorded, name))
            share.stats = await train_step(self.policies[name], models, share, self.version, cast(Record, NoRecord()))
        states, seeds = await measure(self.trainers)
        if self.reference and self.reference.due(step.done):
            await self.reference.update()
        self.version = step.done
        arrays, about = describe_step(self.job, step)
        own = {"step": step.done, "seeds": seeds, "run": recorded.about["run"], "mean": mean_of_shares(shares)}
        return StepFile(arrays | state_arrays(states), about | own)

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> Floats:
        """Return the log-probs of trajectories with the present weights of their policies."""
        parts: dict[int, Floats] = {}
        for name, own in split(list(trajectories), self.policies).items():
            policy, ends = self.policies[name], np.cumsum([len(item.tokens) for item in own])
            if own:
                batch, temperature = batch_of(own, self.version), policy.config.gconfig.temperature
                scored = np.split(await policy.trainer.log_probs(batch, temperature), ends[:-1])
                parts |= {id(item): part for item, part in zip(own, scored, strict=True)}
        return np.concatenate([parts[id(item)] for item in trajectories])


def _baselines(recorded: StepFile, name: str) -> Callable[[Any], Floats]:
    """Return the baselines that the run used; a trajectory has the baseline of its group's prompt."""
    key = f"inputs/{name}/baselines" if name else "inputs/baselines"

    def find(groups: Any) -> Floats:
        if key not in recorded.arrays:
            raise CheckpointError(
                f"the algorithm needs values of prompts, and step {recorded.step} was trained without them. Choose "
                "settings that do not need them"
            )
        scored = [item for item in recorded.trajectories() if item.reward is not None]
        known = dict(zip([item.group_id for item in scored], recorded.arrays[key].tolist(), strict=False))
        return np.array([known[int(group)] for group in groups], np.float32)

    return find


@asynccontextmanager
async def start_trainers(
    job: Job, run: RecordedRun, place: ReplayStart, scratch: Path, *, evaluates: bool = False
) -> AsyncIterator[Replay]:
    """Start the run's trainers at a place, with room for servers if it evaluates; all processes end with the block."""
    used = [each for each in job.plan.engines if each.kind == "trainer" or (evaluates and each.role != "teacher")]
    plan = replace(job.plan, engines=tuple(used))
    models = await model_directories(job.config, run.path)
    opened = cast(Any, SimpleNamespace(checkpoint=place.checkpoint, record=NoRecord()))
    async with run_cluster(
        job.config.scheduler,
        plan,
        uses_gpus=job.device == "cuda",
        log_dir=scratch / "logs",
        shared_dir=scratch / ".weights",
        ports=job.config.cluster.ports,
        interface=job.config.cluster.interface,
    ) as cluster:
        ready = await ready_trainers(cluster, job, models, opened, View(enabled=False), StartupTimes())
        trainers, actor = ready.roles, ready.roles["actor"]
        policies = {
            part.adapter or "": Policy(
                part.adapter or "", part.config, part.algorithm, actor.using(part.adapter) if part.adapter else actor,
                cast(Any, None),
            )
            for part in (job.adapters or [job])
        }  # fmt: skip
        known = Models(ready.reference, trainers.get("critic"))
        yield Replay(cluster, job, models["actor"], policies, known, trainers, ready.reference, place.version)


async def replay_to(replay: Replay, run: RecordedRun, last: int) -> AsyncIterator[tuple[StepFile, StepFile]]:
    """Train up to a step; yield each recorded step with the replayed one."""
    while replay.version < last:
        recorded = (await asyncio.to_thread(run.step, replay.version + 1)).file
        yield recorded, await replay.step(recorded)
