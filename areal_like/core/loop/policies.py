"""Several adapters of one run: their groups side by side, each adapter with its own data, reward and algorithm.

The statistics of a batch are those of all its trajectories, and of each adapter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.schema import RunConfig
from areal_like.core.errors import RewardsMissing
from areal_like.core.sampling_masks import KEPT
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import LEAST_LOGPROB, TEACHER_LOGPROBS, FinishReason, Trajectory


class RewardStatistics(Protocol):
    """The rewards of a policy's responses, as the loop reports them."""

    def queue_seconds_mean(self) -> float:
        """Return the mean time for which a response has waited for its reward, lately."""

    def statistics(self) -> Mapping[str, float]:
        """Return statistics since the last call."""


@dataclass(eq=False)
class Policy:
    """The run's policy, without a name, or one of several adapters: its settings, its trainer, and its rewards."""

    name: str
    config: RunConfig
    algorithm: Algorithm
    trainer: Trainer
    rewards: RewardStatistics
    episodes: Callable[[], Mapping[str, float]] = dict  # episodes of a workflow by outcome, since the last call
    _missing: int = field(default=0, init=False)  # batches in a row without a reward

    def statistics(self) -> dict[str, float]:
        """Return statistics of rewards and episodes since the last call, of an adapter by `NAME/`."""
        prefix = f"{self.name}/" if self.name else ""
        return {prefix + tag: value for tag, value in {**self.episodes(), **self.rewards.statistics()}.items()}

    def note_missing(self, responses: int, *, missing: bool, step: int) -> None:
        """Note whether a batch had no reward; raise RewardsMissing after too many (`reward.max_missing_batches`)."""
        self._missing = self._missing + 1 if missing else 0
        if self._missing > self.config.reward.max_missing_batches:
            raise RewardsMissing(responses, f"step {step}, adapter {self.name}")


def split(trajectories: list[Trajectory], policies: Mapping[str, Policy]) -> dict[str, list[Trajectory]]:
    """Return the trajectories of each policy: of an only one the list itself, so that `release` frees them."""
    if "" in policies:
        return {"": trajectories}
    found: dict[str, list[Trajectory]] = {name: [] for name in policies}
    for trajectory in trajectories:
        found[list(found)[trajectory.group_id % len(found)]].append(trajectory)
    return found


def describe_batch(trajectories: list[Trajectory], policies: Mapping[str, Policy], version: int) -> dict[str, float]:
    """Return the statistics of a batch, and by `NAME/` each of several adapters' own."""
    found = describe(trajectories, version)
    for name, own in split(trajectories, policies).items() if "" not in policies else ():
        found |= {f"{name}/{tag}": value for tag, value in describe(own, version).items()}
    return found


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
