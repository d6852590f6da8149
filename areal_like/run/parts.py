"""Builds the parts that the loop drives, from the configuration and the processes that were started."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from areal_like.checkpoint.journal import Journal
from areal_like.checkpoint.state import RunState
from areal_like.config.schema import SINGLE_TURN, CurriculumConfig, RunConfig, TrainerRole
from areal_like.data.curriculum import Curriculum
from areal_like.data.prompt_values import PromptValues, prompt_keys
from areal_like.data.stream import PromptStream
from areal_like.job import Job
from areal_like.rewards.scoring import Rewards
from areal_like.rollout.admission import Admission
from areal_like.rollout.collector import Collector
from areal_like.rollout.pool import Sampling
from areal_like.rollout.teacher import Teacher
from areal_like.run.evaluation import EvaluationSet, Evaluator
from areal_like.run.loop import Parts
from areal_like.run.moving_teacher import MovingTeacher
from areal_like.run.prompt_results import PromptResults
from areal_like.trainer.remote import Trainer
from areal_like.weights.sync import WeightSync
from areal_like.workflows.make import Workflows


def make_parts(
    job: Job,
    state: RunState,
    trainer: Trainer,
    sync: WeightSync,
    rewards: Rewards,
    workflows: Workflows,
    tasks: asyncio.TaskGroup,
    teacher: Teacher | None = None,
    results: PromptResults | None = None,
) -> Parts:
    """Return the parts that every run has; prompts come from the stream of `results`, if there are any."""
    config = job.config
    train_data, n_samples = config.train_dataset, config.gconfig.n_samples
    most = config.rollout.max_concurrent_rollouts
    seed = config.seed if config.sglang.deterministic else None
    workflow = workflows.train(_sampling(job), n_samples, seed=seed)
    collector = Collector(
        prompts=results.stream if results else plain_stream(job),
        groups=job.steps * train_data.batch_size,
        workflow=teacher.with_scores(workflow) if teacher else workflow,
        admission=Admission(
            train_data.batch_size,
            config.rollout.max_head_offpolicyness,
            state.version,
            spare=spare_groups(config),
        ),
        max_groups=max(1, most // n_samples) if most else None,
        tasks=tasks,
        keeps=job.algorithm.keeps,
        max_drops=config.actor.max_dropped_groups,
        again=state.untrained,
        started=state.started,
        dropped=state.count_dropped(train_data.batch_size),
        note_drop=results.note_drop if results else lambda group, reward: None,
        tokens_generated=state.tokens_generated,
    )
    evaluator = Evaluator(config.evaluator, _evaluation_sets(job, workflows))
    parts = Parts(job.algorithm, trainer, sync, collector, evaluator, rewards, results=results)
    return replace(parts, teacher=teacher.statistics) if teacher else parts


def _sampling(job: Job) -> Sampling:
    """Return how the responses to training prompts are sampled."""
    keys = job.config.gconfig
    return Sampling(
        keys.max_new_tokens,
        keys.temperature,
        keys.top_p,
        job.tokenizer.eos_token_ids,
        top_k=keys.top_k,
        min_p=keys.min_p,
        routes=job.routes,
    )


def make_moving_teacher(
    config: RunConfig, teacher: Teacher | None, trainers: Mapping[TrainerRole, Trainer], directory: Path
) -> MovingTeacher | None:
    """Return what updates the teacher, None if it is fixed, or is the policy itself."""
    section = config.teacher
    if teacher is None or section is None or not section.is_served or section.update_every_steps is None:
        return None
    return MovingTeacher(config, section.update_every_steps, teacher, trainers[section.follows], directory)


def make_results(job: Job, version: int, journal: Journal | None) -> PromptResults | None:
    """Return the results by prompt of a run at `version`, or None if neither prompts nor baselines depend on them.

    Blocks: it reads the journal, and the tokens of every prompt.
    """
    data, has_values = job.config.train_dataset, "baselines" in job.algorithm.needs
    if data.curriculum is None and not has_values:
        return None
    stream = plain_stream(job) if data.curriculum is None else _curriculum(job, data.curriculum)
    values = PromptValues(prompt_keys(job.train_prompts), job.config.actor.value_decay) if has_values else None
    results = PromptResults(stream, values)
    results.resume(journal.steps() if journal else [], version)
    return results


def plain_stream(job: Job) -> PromptStream:
    """Return the stream of the training prompts, whatever their results."""
    data = job.config.train_dataset
    return PromptStream(job.train_prompts, shuffle=data.shuffle, seed=job.config.seed, weights=data.weights)


def _curriculum(job: Job, section: CurriculumConfig) -> Curriculum:
    """Return the stream whose blocks are drawn as soon as one of their groups may start."""
    data = job.config.train_dataset
    return Curriculum(
        job.train_prompts,
        shuffle=data.shuffle,
        seed=job.config.seed,
        config=section,
        keys=prompt_keys(job.train_prompts, section.field),
        block=data.batch_size,
        ahead=job.config.rollout.max_head_offpolicyness + math.ceil(spare_groups(job.config) / data.batch_size),
        weights=data.weights,
    )


def spare_groups(config: RunConfig) -> int:
    """Return how many groups may start beyond those that are trained."""
    return math.ceil(config.rollout.oversampling * config.train_dataset.batch_size)


def _evaluation_sets(job: Job, workflows: Workflows) -> dict[str, EvaluationSet]:
    sets = {}
    for name, data in job.config.evaluations.items():
        n_samples, most = data.n_samples or 1, data.max_new_tokens or job.config.gconfig.max_new_tokens
        sampling = Sampling(most, data.temperature or 0.0, stop_token_ids=job.tokenizer.eos_token_ids)
        sets[name] = EvaluationSet(
            job.evaluated[name], workflows.evaluate(data.workflow or SINGLE_TURN, sampling, n_samples), n_samples
        )
    return sets
