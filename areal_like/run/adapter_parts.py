"""Builds the parts of a run with several adapters from runs with each of them alone."""

import asyncio
from collections.abc import Mapping

from areal_like.core.checkpoint.journal import RunState
from areal_like.core.loop.loop import Parts
from areal_like.core.loop.policies import Collectors, Policy, state_of
from areal_like.core.rollout.collector import Collector
from areal_like.core.trainer.remote import Trainer
from areal_like.core.weights import WeightSync
from areal_like.job import Job
from areal_like.run.collecting import make_collector, make_evaluator
from areal_like.run.ready import Scoring


def make_adapter_parts(
    job: Job,
    state: RunState,
    trainers: Mapping[str, Trainer],
    sync: WeightSync,
    scoring: Mapping[str, Scoring],
    tasks: asyncio.TaskGroup,
) -> Parts:
    """Return the parts of a run; its adapters have trainers and scoring by name, and share the rest."""
    collectors, policies = dict[str, Collector](), dict[str, Policy]()
    for (name, trainer), own in zip(trainers.items(), job.adapters, strict=True):
        rewards, workflows = scoring[name]
        place = state_of(state, list(trainers), name)
        collectors[name] = make_collector(own, place, workflows, tasks)
        policies[name] = Policy(name, own.config, own.algorithm, trainer, rewards, workflows.counts)
    evaluator = make_evaluator(job, {name: own.workflows for name, own in scoring.items()})
    return Parts(policies, sync, Collectors(collectors), evaluator)
