"""Supervised training on reference answers before reinforcement learning, through the same trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from areal_like.algorithms.batch import supervised_batch
from areal_like.algorithms.losses import sft
from areal_like.config.schema import WarmStartConfig
from areal_like.data.tokenizer import Tokenizer
from areal_like.metrics.console import View
from areal_like.trainer.remote import Trainer
from areal_like.types import Batch, LossSpec, Prompt

type Example = tuple[Sequence[int], Sequence[int]]


async def warm_start(
    config: WarmStartConfig,
    trainer: Trainer,
    examples: Iterator[Example],
    held_out: Sequence[Example],
    temperature: float,
    view: View,
) -> tuple[int, float]:
    """Train until the held-out expected reward is reached; returns the optimizer steps taken and that reward."""
    test = supervised_batch(held_out)
    reward = 0.0
    with view.doing("warm start", config.steps) as advance:
        for step in range(1, config.steps + 1):
            batch = supervised_batch(list(islice(examples, config.batch_size)))
            await trainer.train(batch, LossSpec(sft), temperature, learning_rate=config.lr)
            advance()
            if step % config.check_every == 0 or step == config.steps:
                reward = await expected_reward(trainer, test, temperature)
                if reward >= config.target_reward:
                    break
    return step, reward


async def expected_reward(trainer: Trainer, batch: Batch, temperature: float) -> float:
    """Mean probability of a whole reference response: what a verifier that accepts nothing else would give."""
    logprobs = await trainer.log_probs(batch, temperature) * batch.fields["loss_mask"]
    sequence = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    return float(np.exp(np.bincount(sequence, logprobs)).mean())


def examples(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> Iterator[Example]:
    """Prompts with their reference answers, end token included."""
    for prompt in prompts:
        yield prompt.tokens, tokenizer.encode_response(prompt.answer)
