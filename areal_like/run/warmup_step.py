"""A warm-up step before the first one, while the servers start: it compiles kernels and changes no state."""

from collections.abc import Mapping
from itertools import chain, islice

import numpy as np

from areal_like.core.config.schema import TrainerRole
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import Batch
from areal_like.job import Job

# Megatron remembers magnitudes for FP8, and captures its first calls as graphs: a warm-up step would be among them.
_REMEMBERING = {"fp8", "fp4", "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"}


def warmup_roles(job: Job) -> list[TrainerRole]:
    """Return the roles with kernels to compile, on GPUs where no server is sizing its memory at that time."""
    if job.device == "cpu":
        return []
    taken = {device for engine in job.plan.engines if engine.kind == "server" for device in engine.devices}
    return [
        role
        for role, section in job.config.roles.items()
        if not taken & set(job.plan.engine(role).devices)
        and not _REMEMBERING & section.megatron.override_transformer_config.keys()
    ]


async def run_warmup_step(job: Job, trainers: Mapping[TrainerRole, Trainer]) -> None:
    """Run the step on these ranks, one role after the other since roles may share GPUs."""
    for role in warmup_roles(job):
        await trainers[role].warm_up(warmup_batch(job, role))


def warmup_batch(job: Job, role: TrainerRole) -> Batch:
    """Return prompts joined to sequences of maximum length: a full micro-batch for each data-parallel rank."""
    config, longest = job.config, job.config.longest_sequence
    samples = config.prompts_per_step * config.gconfig.n_samples // config.actor.ppo_n_minibatches
    full = job.plan.engine(role).sizes.dp * (config.roles[role].mb_spec.max_tokens_per_mb // longest)
    lengths = np.full(max(1, min(samples, full)), longest, np.int32)
    words = islice(chain.from_iterable(prompt.tokens for prompt in job.train_prompts), int(lengths.sum()))
    tokens = np.resize(np.fromiter(words, np.int32), lengths.sum())
    return Batch(lengths, tokens, {"loss_mask": np.ones(len(tokens), np.float32)})
