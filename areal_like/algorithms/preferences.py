"""Pairs of better and worse responses, for direct preference optimization."""

from collections.abc import Mapping

import numpy as np

from areal_like.algorithms.types import Experience
from areal_like.types import Floats


def ranked_pairs(experience: Experience) -> Mapping[str, Floats]:
    """`preferred`, `partner` and `loss_mask` of the pairs that each group gives: its best response and its worst one,
    the second best and the second worst, and so on as long as their rewards differ.

    All are `[trajectories]`; `loss_mask` is 0 for those without a partner. Reads `proximal_logprobs` and
    `reference_logprobs`.

    Source: Online AI feedback (arXiv 2402.04792), with rewards for the annotator; it draws two responses to a prompt.
    """
    batch, rewards = experience.batch, experience.rewards
    fields = batch.fields
    log_ratio = (fields["proximal_logprobs"] - fields["reference_logprobs"]) * fields["loss_mask"]
    distance = np.add.reduceat(log_ratio, np.cumsum(batch.lengths) - batch.lengths, dtype=np.float64)
    preferred, partner = np.zeros(len(rewards), np.float32), np.zeros(len(rewards), np.float32)
    for group in np.unique(experience.groups):
        member = np.flatnonzero(experience.groups == group)
        ranked = member[np.argsort(-rewards[member], kind="stable")]
        better, worse = ranked[: len(ranked) // 2], ranked[::-1][: len(ranked) // 2]
        differ = rewards[better] > rewards[worse]
        better, worse = better[differ], worse[differ]
        preferred[better], preferred[worse] = 1, -1
        partner[better], partner[worse] = distance[worse], distance[better]
    return {"preferred": preferred, "partner": partner, "loss_mask": np.abs(preferred)}
