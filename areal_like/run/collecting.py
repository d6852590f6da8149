"""Builds a run's groups and its evaluation sets from the configuration: prompts, workflows and admission."""

import asyncio
from collections.abc import Mapping

from areal_like.core.checkpoint.journal import RunState
from areal_like.core.config.schema import evaluation_name
from areal_like.core.loop.evaluation import EvaluationSet, Evaluator
from areal_like.core.loop.prompt_results import PromptResults
from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.collector import Collector
from areal_like.core.rollout.sample import Sampling
from areal_like.core.rollout.single_turn import MakesWorkflows
from areal_like.core.rollout.stream import PromptStream
from areal_like.job import Job
from areal_like.rewards.teacher import Teacher


def make_collector(
    job: Job,
    state: RunState,
    workflows: MakesWorkflows,
    tasks: asyncio.TaskGroup,
    teacher: Teacher | None = None,
    results: PromptResults | None = None,
) -> Collector:
    """Return the collector of the run's groups."""
    config = job.config
    train_data, n_samples = config.train_dataset, config.gconfig.n_samples
    most = config.rollout.max_concurrent_rollouts
    seed = config.seed if config.sglang.deterministic else None
    workflow = workflows.train(_sampling(job), n_samples, seed=seed)
    return Collector(
        prompts=results.stream if results else plain_stream(job),
        groups=job.steps * train_data.batch_size,
        workflow=teacher.with_scores(workflow) if teacher else workflow,
        admission=Admission(
            train_data.batch_size, config.rollout.max_head_offpolicyness, state.version, spare=config.spare_groups
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
        columns=job.served,
        adapter=job.adapter,
    )


def plain_stream(job: Job) -> PromptStream:
    """Return the stream of the training prompts, independent of their results."""
    data = job.config.train_dataset
    return PromptStream(job.train_prompts, shuffle=data.shuffle, seed=job.config.seed, weights=data.weights)


def make_evaluator(job: Job, workflows: Mapping[str, MakesWorkflows]) -> Evaluator:
    """Return the evaluator of a run; several adapters have workflows by name, any other run has them by ""."""
    sets = {
        evaluation_name(own.adapter, name) if own.adapter else name: part
        for own in job.adapters or [job]
        for name, part in _evaluation_sets(own, workflows[own.adapter or ""]).items()
    }
    return Evaluator(job.config.evaluator, sets)


def _evaluation_sets(job: Job, workflows: MakesWorkflows) -> dict[str, EvaluationSet]:
    """Return the evaluation sets of a run, or of one of several adapters, by name."""
    sets = {}
    for name, data in job.config.evaluations.items():
        n_samples, most = data.n_samples or 1, data.max_new_tokens or job.config.gconfig.max_new_tokens
        sampling = Sampling(
            most,
            data.temperature or 0.0,
            1.0 if data.top_p is None else data.top_p,
            job.tokenizer.eos_token_ids,
            top_k=-1 if data.top_k is None else data.top_k,
            adapter=job.adapter,
            trained=False,
        )
        sets[name] = EvaluationSet(job.evaluated[name], workflows.evaluate(data, sampling, n_samples), n_samples)
    return sets
