"""Supervised training on reference answers before reinforcement learning, through the same trainer."""

import time
from collections.abc import Sequence
from itertools import islice

import numpy as np

from areal_like.core.algorithms.batch import supervised_batch
from areal_like.core.algorithms.losses import sft
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import Batch, LossSpec, Prompt
from areal_like.data.tokenizer import Tokenizer
from areal_like.job import Job
from areal_like.metrics.console import View

SHOW_S = 5.0  # between two lines of progress


async def warm_start(job: Job, trainer: Trainer, view: View) -> None:
    """Train until the expected evaluation reward is reached, or for `warm_start.steps` optimizer steps.

    The answers are data, which is fitted at temperature 1; the reward belongs to sampling (`gconfig.temperature`).
    """
    config, temperature = job.config.warm_start, job.config.gconfig.temperature
    if config is None:
        return
    training = iter(PromptStream(job.train_prompts, shuffle=True, seed=job.config.seed))
    shown = time.monotonic()
    view.say(
        f"warm start on reference answers: at most {config.steps} steps, until the reward is {config.target_reward:g}"
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
                    view.say(
                        f"warm start: step {step} of at most {config.steps}, expected evaluation reward {reward:.3f}"
                    )
                    shown = time.monotonic()
                if reward >= config.target_reward:
                    break
    view.say(f"warm start: expected evaluation reward {reward:.3f} after {step} steps")


async def expected_reward(trainer: Trainer, batch: Batch, temperature: float) -> float:
    """Mean probability of a whole reference response: the reward of a verifier that accepts nothing else."""
    logprobs = await trainer.log_probs(batch, temperature) * batch.fields["loss_mask"]
    sequence = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    return float(np.exp(np.bincount(sequence, logprobs)).mean())


def _examples(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Batch:
    """Return prompts with their reference answers, end token included."""
    pairs = [(prompt.tokens, tokenizer.encode_response(prompt.answer)) for prompt in prompts]
    return supervised_batch(pairs, [prompt.images for prompt in prompts])
