"""Builds the parts of a run with several adapters from runs with each of them alone."""

import asyncio
from collections.abc import Mapping

from areal_like.core.checkpoint.journal import RunState
from areal_like.core.config.schema import evaluation_name
from areal_like.core.loop.evaluation import EvaluationSet, Evaluator
from areal_like.core.loop.loop import Parts
from areal_like.core.loop.policies import Collectors, Policy, state_of
from areal_like.core.rollout.collector import Collector
from areal_like.core.rollout.single_turn import MakesWorkflows
from areal_like.core.trainer.remote import Trainer
from areal_like.core.weights import WeightSync
from areal_like.job import Job
from areal_like.rewards.scoring import Rewards
from areal_like.run.collecting import evaluation_sets, make_collector


def make_adapter_parts(
    job: Job,
    state: RunState,
    trainers: Mapping[str, Trainer],
    sync: WeightSync,
    scoring: Mapping[str, tuple[Rewards, MakesWorkflows]],
    tasks: asyncio.TaskGroup,
) -> Parts:
    """Return the parts of a run; its adapters have trainers and scoring by name, and share the rest."""
    collectors, policies, sets = dict[str, Collector](), dict[str, Policy](), dict[str, EvaluationSet]()
    for (name, trainer), own in zip(trainers.items(), job.adapters, strict=True):
        rewards, workflows = scoring[name]
        place = state_of(state, list(trainers), name)
        collectors[name] = make_collector(own, place, workflows, tasks)
        policies[name] = Policy(name, own.config, own.algorithm, trainer, rewards, workflows.counts)
        sets |= {evaluation_name(name, key): part for key, part in evaluation_sets(own, workflows).items()}
    return Parts(policies, sync, Collectors(collectors), Evaluator(job.config.evaluator, sets))
