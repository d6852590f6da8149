"""The warm start of a run on reference answers, and the warm-up step that compiles kernels."""

import time
from collections.abc import Mapping, Sequence
from itertools import chain, islice

import numpy as np

from areal_like.core.algorithms.batch import supervised_batch
from areal_like.core.algorithms.losses import sft
from areal_like.core.config.schema import TrainerRole
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import Batch, LossSpec, Prompt
from areal_like.data.tokenizer import Tokenizer
from areal_like.job import Job
from areal_like.metrics.console import View

SHOW_S = 5.0  # between two lines of progress


async def warm_start(job: Job, trainer: Trainer, view: View) -> None:
    """Train until an evaluation answer has the mean probability `target_reward`, or for `warm_start.steps` steps.

    The answers are data, which is fitted at temperature 1; the reward belongs to sampling (`gconfig.temperature`).
    """
    config, temperature = job.config.warm_start, job.config.gconfig.temperature
    if config is None:
        return
    training = iter(PromptStream(job.train_prompts, shuffle=True, seed=job.config.seed))
    shown = time.monotonic()
    view.say(
        f"warm start on reference answers: at most {config.steps} steps, or until the mean probability of an "
        f"evaluation answer is {config.target_reward:g}"
    )
    test = _examples(job.valid_prompts, job.tokenizer)
    with view.doing("warm start", config.steps) as advance:
        for step in range(1, config.steps + 1):
            batch = _examples(list(islice(training, config.batch_size)), job.tokenizer)
            await trainer.train(batch, LossSpec(sft), 1.0, learning_rate=config.lr)
            advance()
            if step % config.check_every == 0 or step == config.steps:
                reward = await expected_reward(trainer, test, temperature)
                if time.monotonic() - shown >= SHOW_S:
                    view.say(f"warm start: step {step} of at most {config.steps}, mean probability {reward:.3f}")
                    shown = time.monotonic()
                if reward >= config.target_reward:
                    break
    view.say(f"warm start: mean probability {reward:.3f} after {step} steps")


async def expected_reward(trainer: Trainer, batch: Batch, temperature: float) -> float:
    """Mean probability of a whole reference response: the reward of a verifier that accepts nothing else."""
    logprobs = await trainer.log_probs(batch, temperature) * batch.fields["loss_mask"]
    sequence = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    return float(np.exp(np.bincount(sequence, logprobs)).mean())


def _examples(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Batch:
    """Return prompts with their reference answers, end token included."""
    pairs = [(prompt.tokens, tokenizer.encode_response(prompt.answer)) for prompt in prompts]
    return supervised_batch(pairs, [prompt.images for prompt in prompts])


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
