"""Servers with their clients, and trainers, as they are when training begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from areal_like.backends.ray.run import RunCluster
from areal_like.core.config.schema import TrainerRole
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.single_turn import MakesWorkflows
from areal_like.core.trainer.remote import Reference, Trainer
from areal_like.core.transfer import FileSource
from areal_like.job import Job
from areal_like.metrics.console import View
from areal_like.rewards.scoring import Rewards
from areal_like.rewards.teacher import Teacher


class Scoring(NamedTuple):
    """Judges of responses, and the workflows that use them."""

    rewards: Rewards
    workflows: MakesWorkflows


@dataclass(frozen=True)
class Serving:
    """The servers and their clients, which outlive a trainer.

    `scoring` has several adapters' scoring by name, or the run's by "".
    """

    pool: ServerPool
    scoring: Mapping[str, Scoring]
    teacher: Teacher | None
    source: FileSource | None = None  # of weights that servers download


@dataclass(frozen=True)
class Trainers:
    """Started trainers by role, and the reference if the run has one."""

    roles: Mapping[TrainerRole, Trainer]
    reference: Reference | None


@dataclass(frozen=True)
class Run:
    """The parts that every attempt to train shares."""

    cluster: RunCluster
    job: Job
    models: Mapping[TrainerRole, Path]
    view: View
    serving: Serving
