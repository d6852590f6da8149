"""Results of earlier steps by prompt, which choose later prompts and are baselines; the journal has them all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from areal_like.core.checkpoint.journal import RunState, Step
from areal_like.core.loop.prompt_values import PromptValues
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Floats, Ints, Prompt, Trajectory, mean_reward


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
    collector: Groups,
    results: PromptResults | None,
    trajectories: Sequence[Trajectory],
    done: int,
    in_row: int,
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
