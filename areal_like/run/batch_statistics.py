"""Statistics of a batch of trajectories: rewards, lengths, staleness, and values that servers returned beside
tokens."""

from collections.abc import Sequence

import numpy as np

from areal_like.sampling_masks import KEPT
from areal_like.types import LEAST_LOGPROB, TEACHER_LOGPROBS, FinishReason, Trajectory


def describe(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return statistics of a batch trained at `version`; `reward` only if one is known.

    A reward belongs to a sample, which may have several trajectories: it counts once.
    """
    if not trajectories:  # every episode failed before it had generated anything
        return {"reward_missing": 0.0, "skipped_batches": 1.0}
    rewards = [item.reward for item in trajectories if item.reward is not None]
    of_samples = [np.mean(own) for own in _by_sample(trajectories).values()]
    staleness = [version - item.oldest_version for item in trajectories]
    parts: dict[str, list[float]] = {}
    for name, part in (part for item in trajectories for part in item.reward_parts.items()):
        parts.setdefault(f"reward_parts/{name}", []).append(part)
    return (
        ({"reward": float(np.mean(of_samples))} if rewards else {})
        | {
            "reward_missing": float(len(trajectories) - len(rewards)),
            "skipped_batches": float(not rewards),
            "response_length": float(np.mean([item.response_length for item in trajectories])),
            "truncated_share": float(np.mean([item.finish_reason is FinishReason.LENGTH for item in trajectories])),
            "staleness_mean": float(np.mean(staleness)),
            "staleness_max": float(np.max(staleness)),
        }
        | {tag: float(np.mean(values)) for tag, values in parts.items()}
        | _reverse_kl(trajectories)
        | _describe_served(trajectories)
    )


def _reverse_kl(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean reverse KL divergence from the teacher per sampled token, if the run has a teacher."""
    ratios = [
        (item.logprobs - np.maximum(taught, LEAST_LOGPROB))[item.generated]
        for item in trajectories
        if (taught := item.columns.get(TEACHER_LOGPROBS)) is not None and item.reward is not None
    ]
    return {"teacher/reverse_kl": float(np.mean(np.concatenate(ratios)))} if ratios else {}


def _describe_served(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the ids kept per generated token, where servers return any."""
    counts = [item.columns[KEPT].counts[item.generated] for item in trajectories if KEPT in item.columns]
    return {"kept_ids": float(np.mean(np.concatenate(counts)))} if counts else {}


def _by_sample(trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], list[float]]:
    """Return the rewards of each sample's trajectories, for samples with rewards."""
    rewards: dict[tuple[int, int], list[float]] = {}
    for item in trajectories:
        if item.reward is not None:
            rewards.setdefault((item.group_id, item.sample), []).append(item.reward)
    return rewards
