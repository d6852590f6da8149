"""Builds the parts that the loop drives, from the configuration and the processes that were started."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from areal_like.capability import make_stream
from areal_like.core.checkpoint.journal import Journal, RunState
from areal_like.core.loop.loop import Parts
from areal_like.core.loop.policies import Policy
from areal_like.core.loop.prompt_results import PromptResults, PromptValues, prompt_keys
from areal_like.core.rollout.collector import Collector, Collectors
from areal_like.core.rollout.single_turn import MakesWorkflows
from areal_like.core.trainer.remote import Trainer
from areal_like.core.weights import WeightSync
from areal_like.job import Job
from areal_like.rewards.scoring import Rewards
from areal_like.rewards.teacher import Teacher
from areal_like.run.collecting import make_collector, make_evaluator, plain_stream
from areal_like.run.ready import Scoring


def make_parts(
    job: Job,
    state: RunState,
    trainer: Trainer,
    sync: WeightSync,
    rewards: Rewards,
    workflows: MakesWorkflows,
    tasks: asyncio.TaskGroup,
    teacher: Teacher | None = None,
    results: PromptResults | None = None,
) -> Parts:
    """Return the parts that every run has; prompts come from the stream of `results`, if there are any."""
    collector = make_collector(job, state, workflows, tasks, teacher, results)
    policy = Policy("", job.config, job.algorithm, trainer, rewards, workflows.counts)
    statistics = [each.statistics for each in (teacher, results and results.stream) if each]
    evaluator = make_evaluator(job, {"": workflows})
    return Parts({"": policy}, sync, collector, evaluator, statistics=statistics, results=results)


def make_adapter_parts(
    job: Job,
    state: RunState,
    trainers: Mapping[str, Trainer],
    sync: WeightSync,
    scoring: Mapping[str, Scoring],
    tasks: asyncio.TaskGroup,
) -> Parts:
    """Return the parts of a run with several adapters: trainers and scoring by name, and the rest, which they share."""
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


def make_results(job: Job, version: int, journal: Journal | None) -> PromptResults | None:
    """Return the results by prompt of a run at `version`, or None if neither prompts nor baselines depend on them.

    Blocks: it reads the journal, and the tokens of every prompt.
    """
    stream, has_values = make_stream(job), "baselines" in job.algorithm.needs
    if stream is None and not has_values:
        return None
    values = PromptValues(prompt_keys(job.train_prompts), job.config.actor.value_decay) if has_values else None
    results = PromptResults(stream or plain_stream(job), values)
    results.resume(journal.steps() if journal else [], version)
    return results
