"""Every preset learns: the loop's own step, on a table of log-probs that torch trains in this process.

A task has two tokens to get right, of four each, so that a policy that knows nothing has reward 1/16. Samples are one
version old, and a step has two mini-batches: ratios, behaviour weights, clipping and the critic's values all take part.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from running import CONFIG
from test_train_step import Silent

from areal_like.core.algorithms.losses import LossInputs, Sequences
from areal_like.core.algorithms.presets import ALGORITHMS, make_algorithm
from areal_like.core.config.load import load
from areal_like.core.hooks import Share
from areal_like.core.loop.policies import Policy
from areal_like.core.loop.prompt_results import PromptResults, PromptValues, prompt_keys
from areal_like.core.loop.step import Models, train_step
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import TEACHER_LOGPROBS, Batch, FinishReason, LossSpec, Prompt, Trajectory

TASKS, LENGTH, WORDS, SAMPLES = 8, 2, 4, 8
TARGETS = np.random.default_rng(0).integers(0, WORDS, (TASKS, LENGTH))
TEACHER = torch.log_softmax(6 * torch.eye(WORDS)[torch.from_numpy(TARGETS)], -1).numpy()  # mostly right
OWN_CLIPS = ("actor.eps_clip=null", "actor.eps_clip_higher=null", "actor.use_decoupled_loss=null")
NEEDS = {"distill": ["teacher.path=model"], "ppo": ["critic={}"], "dpo": ["ref={}", "actor.ppo_n_minibatches=1"]}
STEPS = {"dpo": 100, "sft": 120}  # of one optimizer step; of right answers alone


class Table:
    """The policy, its reference, or a critic: numbers for each task and place, trained as an engine trains a model.

    A sequence is its task's number and the tokens of the response.
    """

    def __init__(self, width: int) -> None:
        self.weights = torch.zeros(TASKS, LENGTH, width, requires_grad=True)
        self._optimizer = torch.optim.Adam([self.weights], lr=0.05)

    def outputs(self, batch: Batch) -> torch.Tensor:
        """`[sequences, LENGTH, width]`."""
        return self.weights[torch.from_numpy(batch.tokens.reshape(-1, 1 + LENGTH)[:, 0].astype(np.int64))]

    def chosen(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the responses' tokens and entropies, `[sequences, LENGTH]`."""
        words = torch.from_numpy(batch.tokens.reshape(-1, 1 + LENGTH)[:, 1:].astype(np.int64))
        log_probs = self.outputs(batch).log_softmax(-1)
        return log_probs.gather(-1, words[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)

    async def log_probs(self, batch: Batch, temperature: float) -> np.ndarray:
        return _with_first_column(self.chosen(batch)[0])

    async def values(self, batch: Batch) -> np.ndarray:
        return _with_first_column(self.outputs(batch)[..., 0])

    async def train(self, batch: Batch, loss: LossSpec, temperature: float) -> dict[str, float]:
        trained = torch.from_numpy(batch.fields["loss_mask"].reshape(-1, 1 + LENGTH)[:, 1:] > 0)
        fields = {
            name: torch.from_numpy(values.reshape(-1, 1 + LENGTH)[:, 1:])[trained]
            for name, values in batch.fields.items()
        }
        numbers = torch.arange(len(batch.lengths))[:, None].expand(-1, LENGTH)[trained]
        sequences = Sequences(numbers, len(batch.lengths))
        if self.weights.shape[-1] == 1:
            nothing = torch.zeros(0)
            inputs = LossInputs(nothing, nothing, fields, sequences, self.outputs(batch)[..., 0][trained])
        else:
            log_probs, entropy = self.chosen(batch)
            inputs = LossInputs(log_probs[trained], entropy[trained], fields, sequences)
        per_token, stats = loss.function(inputs, loss.parameters)
        mean = (per_token * fields.get("loss_weights", 1.0)).mean()
        self._optimizer.zero_grad()
        mean.backward()
        self._optimizer.step()
        return {
            "loss": mean.item(),
            "loss_tokens": float(trained.sum()),
            **{n: s.mean().item() for n, s in stats.items()},
        }


def _with_first_column(values: torch.Tensor) -> np.ndarray:
    """`[tokens]`, 0 at each sequence's first."""
    return torch.nn.functional.pad(values.detach(), (1, 0)).reshape(-1).numpy().astype(np.float32)


def sampled(policy: Table, version: int, rng: np.random.Generator) -> list[list[Trajectory]]:
    """A group for each task; what a table knows at `version`."""
    logits = policy.weights.detach().log_softmax(-1).numpy()
    words = (logits[:, None] + rng.gumbel(size=(TASKS, SAMPLES, LENGTH, WORDS))).argmax(-1)  # [tasks, samples, LENGTH]
    made = np.array([-1] + [version] * LENGTH, np.int32)

    def trajectory(task: int, sample: int, response: np.ndarray) -> Trajectory:
        tokens, logprobs = np.array([task, *response], np.int32), np.zeros(1 + LENGTH, np.float32)
        logprobs[1:] = logits[task, np.arange(LENGTH), response]
        reward = float((response == TARGETS[task]).all())
        group = version * TASKS + task
        taught = np.concatenate([[0], TEACHER[task, np.arange(LENGTH), response]]).astype(np.float32)
        item = Trajectory(task, group, tokens, logprobs, made, FinishReason.STOP, reward, sample=sample)
        return replace(item, columns={TEACHER_LOGPROBS: taught})

    return [[trajectory(task, i, response) for i, response in enumerate(words[task])] for task in range(TASKS)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns(name: str) -> None:
    config = load(CONFIG, [f"algorithm={name}", *OWN_CLIPS, *NEEDS.get(name, [])]).config
    rng, policy = np.random.default_rng(0), Table(WORDS)
    algorithm, tasks = make_algorithm(config), [Prompt(task, [task]) for task in range(TASKS)]
    results = PromptResults(PromptStream(tasks, shuffle=False, seed=0), PromptValues(prompt_keys(tasks), 0.9))
    learner = Policy("", config, algorithm, cast(Any, policy), cast(Any, None))
    models = Models(
        reference=cast(Any, copy.deepcopy(policy)) if config.ref else None,
        critic=cast(Any, Table(1)) if config.critic else None,
        baselines=results.baselines if "baselines" in algorithm.needs else None,
    )

    async def train() -> float:
        older, rewards = sampled(policy, 0, rng), []
        for version in range(STEPS.get(name, 60)):
            newer = sampled(policy, version, rng)
            keeps = algorithm.keeps or (lambda group: True)
            trajectories = [item for group in older if keeps(group) for item in group]
            rewards.append(np.mean([item.reward for group in newer for item in group]))
            await train_step(learner, models, Share(trajectories), version, cast(Any, Silent()))
            results.describe(version + 1, sorted({item.group_id for item in trajectories}), trajectories)
            older = newer
        return float(np.mean(rewards[-5:]))

    assert asyncio.run(train()) > 0.9
