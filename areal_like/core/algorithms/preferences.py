"""Pairs of better and worse responses, for direct preference optimization."""

from collections.abc import Mapping

import numpy as np

from areal_like.core.algorithms.types import Experience
from areal_like.core.types import Floats


def every_pair(experience: Experience, beta: float) -> Mapping[str, Floats]:
    """Return DPO's loss, at the weights at the start of the step, of all pairs in a group with different rewards.

    Returns fields `[trajectories]` whose mean over trajectories with a partner is the mean over all pairs: `pair_loss`,
    of its pairs; `slope`, the loss's derivative by the trajectory's own log policy - log reference; `margin` and
    `preferred_share`, over its pairs; `loss_mask`, 0 without a partner. Reads `proximal_logprobs` and
    `reference_logprobs`. With all pairs, a response that is alone among seven others counts seven times: at margins
    near 0 the gradient equals the one of rewards less their group's mean.

    Source: DPO (arXiv 2305.18290), eq. 7; pairs ranked by a judge while training from Online AI feedback
    (arXiv 2402.04792), which draws two responses to a prompt.
    """
    batch, rewards = experience.batch, experience.rewards
    log_ratio = (batch.fields["proximal_logprobs"] - batch.fields["reference_logprobs"]) * batch.fields["loss_mask"]
    distance = np.add.reduceat(log_ratio, np.cumsum(batch.lengths) - batch.lengths, dtype=np.float64)
    loss, slope, margins, right, partners = np.zeros((5, len(rewards)))
    for group in np.unique(experience.groups):
        of = np.flatnonzero(experience.groups == group)
        better = rewards[of][:, None] > rewards[of]  # [better one, worse one]
        margin = beta * (distance[of][:, None] - distance[of])
        surprise = np.where(better, np.logaddexp(0, -margin), 0)  # -log sigmoid
        pull = np.where(better, beta * np.exp(-np.logaddexp(0, margin)), 0)  # beta * sigmoid(-margin)
        slope[of] = pull.sum(0) - pull.sum(1)
        for total, values in ((loss, surprise), (margins, better * margin), (right, better & (margin > 0))):
            total[of] = values.sum(0) + values.sum(1)
        partners[of] = better.sum(0) + better.sum(1)
    paired, n_pairs = partners > 0, max(partners.sum() / 2, 1)
    each = np.maximum(partners, 1)
    return {
        "pair_loss": (loss / 2 * paired.sum() / n_pairs).astype(np.float32),
        "slope": (slope * paired.sum() / n_pairs).astype(np.float32),
        "margin": (margins / each).astype(np.float32),
        "preferred_share": (right / each).astype(np.float32),
        "loss_mask": paired.astype(np.float32),
    }
