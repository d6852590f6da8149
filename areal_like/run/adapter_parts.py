"""Builds the parts of a run with several adapters from runs with each of them alone."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from areal_like.core.checkpoint.journal import RunState
from areal_like.core.loop.loop import Parts
from areal_like.core.loop.policies import Policy
from areal_like.core.rollout.collector import Collector, Collectors
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
        place = _state_of(state, list(trainers), name)
        collectors[name] = make_collector(own, place, workflows, tasks)
        policies[name] = Policy(name, own.config, own.algorithm, trainer, rewards, workflows.counts)
    evaluator = make_evaluator(job, {name: own.workflows for name, own in scoring.items()})
    return Parts(policies, sync, Collectors(collectors), evaluator)


def _state_of(state: RunState, names: Sequence[str], name: str) -> RunState:
    """Return the state of one adapter's groups; the first one has the tokens of all."""
    place, adapters = names.index(name), len(names)
    return replace(
        state,
        started=state.started_by_adapter.get(name, 0),
        untrained=tuple(group // adapters for group in state.untrained if group % adapters == place),
        tokens_generated=0 if place else state.tokens_generated,
    )
