"""Pairs for direct preference optimization."""

import math

import numpy as np
import pytest
import torch
from tolerance import assert_close, close_to

from areal_like.core.algorithms.presets import every_pair
from areal_like.core.algorithms.types import Experience
from areal_like.core.types import Batch

type Reals = list[float]


def experience(rewards: Reals, groups: list[int], distances: Reals) -> Experience:
    """Trajectories of a prompt's token and one of a response, which is that much likelier than for the reference."""
    n = len(rewards)
    policy = np.stack([np.full(n, 9.0), np.array(distances) - 1], axis=1).reshape(-1)  # a prompt's does not count
    fields = {
        "loss_mask": np.tile(np.array([0, 1], np.float32), n),
        "proximal_logprobs": policy.astype(np.float32),
        "reference_logprobs": np.tile(np.array([0, -1], np.float32), n),
    }
    batch = Batch(np.full(n, 2, np.int32), np.zeros(2 * n, np.int32), fields)
    samples = np.arange(len(rewards), dtype=np.int32)
    return Experience(
        np.array(rewards, np.float32), np.array(groups, np.int32), samples, batch, np.zeros(len(rewards), bool)
    )


def test_a_pair_by_hand():
    """Better by 0.3, worse by -0.1, beta 2: the margin is 0.8, the loss -log sigmoid(0.8), and the paper's gradient is
    -beta sigmoid(-0.8) (grad log better - grad log worse). A mean over the two halves each."""
    fields = every_pair(experience([1, 0], [7, 7], [0.3, -0.1]), beta=2)
    expected, slope = math.log(1 + math.exp(-0.8)), 2 / (1 + math.exp(0.8))
    assert fields["pair_loss"].mean() == pytest.approx(expected)
    assert (fields["slope"] / 2).tolist() == pytest.approx([-slope, slope])
    assert fields["margin"].tolist() == pytest.approx([0.8, 0.8])
    assert fields["preferred_share"].tolist() == [1, 1]


def test_the_mean_over_trajectories_is_the_papers_loss_over_all_pairs_with_its_gradient():
    """Groups of several sizes and rewards, some of them equal, against torch's gradient of every pair's loss."""
    rng = np.random.default_rng(0)
    groups = [0] * 5 + [1] * 3 + [2] * 4 + [3]
    rewards = [0, 1, 0.5, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    distances = rng.normal(size=len(groups)).astype(np.float32)
    fields = every_pair(experience(list(map(float, rewards)), groups, distances.tolist()), beta=0.7)
    own = torch.tensor(distances, requires_grad=True)
    n = range(len(groups))
    pairs = [(i, j) for i in n for j in n if groups[i] == groups[j] and rewards[i] > rewards[j]]
    losses = [-torch.nn.functional.logsigmoid(0.7 * (own[i] - own[j])) for i, j in pairs]
    mean = torch.stack(losses).mean()
    (gradient,) = torch.autograd.grad(mean, own)
    paired = fields["loss_mask"] > 0
    assert paired.tolist() == [i in {i for pair in pairs for i in pair} for i in n]
    assert fields["pair_loss"][paired].mean() == close_to(mean.item())
    assert_close(fields["slope"] / paired.sum(), gradient)


def test_equal_rewards_are_no_pair():
    fields = every_pair(experience([1, 1, 0], [0, 0, 1], [0, 0, 0]), beta=1)
    assert fields["loss_mask"].tolist() == [0, 0, 0] and not fields["slope"].any()
