"""Builds the parts that the loop drives, from the configuration and the processes that were started."""

import asyncio
import math
from dataclasses import replace

from areal_like.checkpoint.state import RunState
from areal_like.config.schema import SINGLE_TURN
from areal_like.data.stream import PromptStream
from areal_like.job import Job
from areal_like.rewards.scoring import Rewards
from areal_like.rollout.admission import Admission
from areal_like.rollout.collector import Collector
from areal_like.rollout.pool import Sampling
from areal_like.rollout.teacher import Teacher
from areal_like.run.evaluation import EvaluationSet, Evaluator
from areal_like.run.loop import Parts
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
) -> Parts:
    """Return the parts that every run has."""
    config = job.config
    sampling, train_data, stop = config.gconfig, config.train_dataset, job.tokenizer.eos_token_ids
    most = config.rollout.max_concurrent_rollouts
    workflow = workflows.train(
        Sampling(
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.top_p,
            stop,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            routes=job.routes,
        ),
        sampling.n_samples,
        seed=config.seed if config.sglang.deterministic else None,
    )
    collector = Collector(
        prompts=PromptStream(
            job.train_prompts, shuffle=train_data.shuffle, seed=config.seed, weights=train_data.weights
        ),
        groups=job.steps * train_data.batch_size,
        workflow=teacher.with_scores(workflow) if teacher else workflow,
        admission=Admission(
            train_data.batch_size,
            config.rollout.max_head_offpolicyness,
            state.version,
            spare=math.ceil(config.rollout.oversampling * train_data.batch_size),
        ),
        max_groups=max(1, most // sampling.n_samples) if most else None,
        tasks=tasks,
        keeps=job.algorithm.keeps,
        max_drops=config.actor.max_dropped_groups,
        again=state.untrained,
        started=state.started,
        dropped=state.count_dropped(train_data.batch_size),
        tokens_generated=state.tokens_generated,
    )
    evaluator = Evaluator(config.evaluator, _evaluation_sets(job, workflows))
    parts = Parts(job.algorithm, trainer, sync, collector, evaluator, rewards)
    return replace(parts, teacher=teacher.statistics) if teacher else parts


def _evaluation_sets(job: Job, workflows: Workflows) -> dict[str, EvaluationSet]:
    sets = {}
    for name, data in job.config.evaluations.items():
        n_samples, most = data.n_samples or 1, data.max_new_tokens or job.config.gconfig.max_new_tokens
        sampling = Sampling(most, data.temperature or 0.0, stop_token_ids=job.tokenizer.eos_token_ids)
        sets[name] = EvaluationSet(
            job.evaluated[name], workflows.evaluate(data.workflow or SINGLE_TURN, sampling, n_samples), n_samples
        )
    return sets
