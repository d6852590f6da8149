"""Pairs of better and worse responses, for direct preference optimization."""

from collections.abc import Mapping

import numpy as np

from areal_like.algorithms.types import Experience
from areal_like.types import Floats


def best_and_worst(experience: Experience) -> Mapping[str, Floats]:
    """`preferred`, `partner` and `loss_mask` of the pair that each group gives: its best and its worst response.

    All are `[trajectories]`; `loss_mask` is 0 for the others, and for all of a group whose rewards are equal. Reads
    `proximal_logprobs` and `reference_logprobs`.

    Source: Online AI feedback (arXiv 2402.04792), with rewards for the annotator.
    """
    batch, rewards = experience.batch, experience.rewards
    fields = batch.fields
    log_ratio = (fields["proximal_logprobs"] - fields["reference_logprobs"]) * fields["loss_mask"]
    distance = np.add.reduceat(log_ratio, np.cumsum(batch.lengths) - batch.lengths, dtype=np.float64)
    preferred, partner = np.zeros(len(rewards), np.float32), np.zeros(len(rewards), np.float32)
    for group in np.unique(experience.groups):
        member = np.flatnonzero(experience.groups == group)
        best, worst = member[rewards[member].argmax()], member[rewards[member].argmin()]
        if rewards[best] > rewards[worst]:
            preferred[best], preferred[worst] = 1, -1
            partner[best], partner[worst] = distance[worst], distance[best]
    return {"preferred": preferred, "partner": partner, "loss_mask": np.abs(preferred)}
