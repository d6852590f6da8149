"""Several adapters of one run: their groups side by side, each adapter with its own data, reward and algorithm.

A training step takes the next batch of every adapter and raises one version, so the staleness bound holds for each. The
group with number k of the adapter at place i of n has the id `i + n * k`, so ids of adapters are disjoint.

The statistics of a batch are those of all its trajectories, and of each adapter.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from areal_like.core.algorithms.types import Algorithm
from areal_like.core.checkpoint.journal import RunState
from areal_like.core.config.schema import RunConfig
from areal_like.core.errors import RewardsMissing
from areal_like.core.rollout.collector import Collector
from areal_like.core.sampling_masks import KEPT
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import LEAST_LOGPROB, TEACHER_LOGPROBS, FinishReason, Prompt, Trajectory, Workflow


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


class Collectors:
    """The collectors of several adapters as one: a batch is the next batch of each."""

    def __init__(self, own: Mapping[str, Collector]) -> None:
        self._own = list(own.values())
        self._names = list(own)
        for place, collector in enumerate(self._own):
            collector.workflow = _renumber(collector.workflow, place, len(own))
            if collector.max_groups is not None:
                collector.max_groups = max(1, collector.max_groups // len(own))

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a group."""
        number, place = divmod(group_id, len(self._own))
        return self._own[place].prompt(number)

    async def next_batch(self) -> list[Trajectory]:
        """Wait for the next batch of every adapter."""
        batches = await asyncio.gather(*(collector.next_batch() for collector in self._own))
        return [trajectory for batch in batches for trajectory in batch]

    def publish(self, version: int) -> None:
        """Note that every server holds `version`, and start the groups that this admits."""
        for collector in self._own:
            collector.publish(version)

    @property
    def dropped(self) -> int:
        """Groups that were dropped, in the whole run."""
        return sum(collector.dropped for collector in self._own)

    @property
    def oldest_s(self) -> float:
        """Seconds for which the oldest unfinished group has run."""
        return max(collector.oldest_s for collector in self._own)

    def newly_dropped(self) -> int:
        """Return how many groups were dropped since the last call."""
        return sum(collector.newly_dropped() for collector in self._own)

    @property
    def taken(self) -> list[int]:
        """The groups of the last batch."""
        return self._ids([collector.taken for collector in self._own])

    @property
    def untrained(self) -> list[int]:
        """Ids of the groups that were admitted and are not trained yet."""
        return self._ids([collector.untrained for collector in self._own])

    @property
    def started(self) -> int:
        """Groups that ever were."""
        return sum(self.started_by_adapter.values())

    @property
    def started_by_adapter(self) -> Mapping[str, int]:
        """Groups of each adapter that ever were."""
        return {name: collector.started for name, collector in zip(self._names, self._own, strict=True)}

    @property
    def tokens_generated(self) -> int:
        """Tokens in the trajectories of finished groups."""
        return sum(collector.tokens_generated for collector in self._own)

    @property
    def tokens_trained(self) -> int:
        """Tokens of trained groups, in this process."""
        return sum(collector.tokens_trained for collector in self._own)

    @property
    def tokens_dropped(self) -> int:
        """Tokens of dropped groups, in this process."""
        return sum(collector.tokens_dropped for collector in self._own)

    @property
    def tokens_waiting(self) -> int:
        """Tokens of groups that are finished and not trained yet."""
        return sum(collector.tokens_waiting for collector in self._own)

    def _ids(self, numbers: Sequence[Sequence[int]]) -> list[int]:
        return [place + len(self._own) * number for place, own in enumerate(numbers) for number in own]


type AnyCollector = Collector | Collectors


def _renumber(workflow: Workflow, place: int, adapters: int) -> Workflow:
    """Return a workflow whose groups have the ids of an adapter's."""

    async def run(prompt: Prompt, number: int) -> list[Trajectory]:
        return await workflow(prompt, place + adapters * number)

    return run


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


def state_of(state: RunState, names: Sequence[str], name: str) -> RunState:
    """Return the state of one adapter's groups; the first one has the tokens of all."""
    place, adapters = names.index(name), len(names)
    return replace(
        state,
        started=state.started_by_adapter.get(name, 0),
        untrained=tuple(group // adapters for group in state.untrained if group % adapters == place),
        tokens_generated=0 if place else state.tokens_generated,
    )


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
