"""Results of earlier steps by prompt, which choose later prompts and are baselines; the journal has them all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

import numpy as np

from areal_like.core.checkpoint.journal import RunState, Step
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Floats, Ints, Prompt, Trajectory, mean_reward, value_at


class PromptValues:
    """Exponentially decaying means of rewards, by row of the prompts.

    Rows with the same key share a mean. An observation of a key multiplies the weight of its earlier ones by `decay`,
    and an observation of a step multiplies the weight of earlier steps in the mean over all prompts.
    """

    def __init__(self, keys: Ints, decay: float) -> None:
        self._keys, self._decay = keys, decay
        n_keys = int(keys.max(initial=-1)) + 1
        self._sums, self._counts = np.zeros(n_keys), np.zeros(n_keys)
        self._sum, self._count = 0.0, 0.0

    def observe(self, rows: Sequence[int], rewards: Sequence[float]) -> None:
        """Record the mean rewards of rows in one step, in their order."""
        for row, reward in zip(rows, rewards, strict=True):
            key = self._keys[row]
            self._sums[key] = self._decay * self._sums[key] + reward
            self._counts[key] = self._decay * self._counts[key] + 1
        self._sum = self._decay * self._sum + sum(rewards)
        self._count = self._decay * self._count + len(rewards)

    def mean(self, row: int) -> float | None:
        """Return the mean of a row, or None if its key was never observed."""
        key = self._keys[row]
        return float(self._sums[key] / self._counts[key]) if self._counts[key] else None

    def baselines(self, rows: Sequence[int]) -> Floats:
        """Return the means of rows, `[rows]`, each with the mean over all prompts as one more observation.

        A row that was never observed has the mean over all prompts, or 0 before the first step.
        """
        overall = self._sum / self._count if self._count else 0.0
        keys = self._keys[np.asarray(rows, np.int64)]
        return ((self._sums[keys] + overall) / (self._counts[keys] + 1)).astype(np.float32)


def prompt_keys(prompts: Sequence[Prompt], field: str | None = None) -> Ints:
    """Return a number for each prompt, `[prompts]`: equal for equal tokens and images, or for equal values of `field`.

    Prompts of different sets of a mixture have different numbers.
    """
    numbers: dict[tuple[str, bytes | str], int] = {}
    keys = np.empty(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        own = _digest(prompt) if field is None else str(value_at(prompt.row, field))
        keys[row] = numbers.setdefault((prompt.dataset, own), len(numbers))
    return keys


def _digest(prompt: Prompt) -> bytes:
    whole = sha256(np.asarray(prompt.tokens, np.int32))
    for image in prompt.images:
        whole.update(sha256(image).digest())
    return whole.digest()


class Groups(Protocol):
    """The groups of a collector, or of the collectors of several adapters."""

    @property
    def taken(self) -> list[int]: ...

    @property
    def untrained(self) -> list[int]: ...

    @property
    def started(self) -> int: ...

    @property
    def started_by_adapter(self) -> Mapping[str, int]: ...

    @property
    def tokens_generated(self) -> int: ...

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a group."""


@dataclass(eq=False)
class PromptResults:
    """Uses of results by prompt: the `stream`, if it chooses by them, and `values` of single rollouts.

    Both are functions of the steps that were observed, so a resumed run observes its journal's steps.
    """

    stream: PromptStream
    values: PromptValues | None = None
    _dropped: list[tuple[int, float]] = field(default_factory=list, init=False)  # since the last step

    def resume(self, steps: Iterable[Step], version: int) -> None:
        """Observe the steps that were trained before, up to `version`."""
        for step in steps:
            self.stream.restore(step.own)
            self._observe(step)
        self.stream.advance(version)

    def note_drop(self, group_id: int, reward: float) -> None:
        """Note the mean reward of a group that was not kept, for the next step."""
        self._dropped.append((group_id, reward))

    def describe(self, version: int, groups: Sequence[int], trajectories: Sequence[Trajectory]) -> Step:
        """Return the step that made `version` from `groups`, with all results since the last one, and observe it."""
        by_group: dict[int, list[Trajectory]] = {}
        for item in trajectories:
            by_group.setdefault(item.group_id, []).append(item)
        rewards = [mean_reward(by_group.get(group, ())) for group in groups]
        samples = [self.stream[group].sample_id for group in groups]
        step = Step(version, groups, samples, rewards, tuple(self._dropped), self.stream.describe())
        self._dropped.clear()
        self._observe(step)
        self.stream.advance(version)
        return step

    def baselines(self, groups: Ints) -> Floats:
        """Return the value of the prompt of each group, before this step; raises ValueError if the run has none."""
        if self.values is None:
            raise ValueError("the run keeps no values of prompts")
        return self.values.baselines([self.stream.row(int(group)) for group in groups])

    def _observe(self, step: Step) -> None:
        trained = zip(step.groups, step.rewards, strict=False)  # a step without results has no rewards
        known = [*((group, reward) for group, reward in trained if reward is not None), *step.dropped]
        rows, rewards = [self.stream.row(group) for group, _ in known], [reward for _, reward in known]
        self.stream.observe(rows, rewards)
        if self.values is not None:
            self.values.observe(rows, rewards)


def describe_place(
    collector: Groups, results: PromptResults | None, trajectories: Sequence[Trajectory], done: int, in_row: int
) -> tuple[Step, RunState]:
    """Return the completed step, and the state of the run after it, before groups of the new version start.

    Both are of one moment: the results in the step decide the prompts of groups that the state does not have.
    """
    if results:
        step = results.describe(done, collector.taken, trajectories)
    else:
        step = Step(done, collector.taken, [collector.prompt(group).sample_id for group in collector.taken])
    untrained, by_adapter = tuple(collector.untrained), collector.started_by_adapter
    generated = collector.tokens_generated
    return step, RunState(done, collector.started, untrained, generated, in_row, started_by_adapter=by_adapter)
