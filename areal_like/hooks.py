"""The moments of a training step at which capabilities act, and their arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_like.algorithms.types import Experience
from areal_like.checkpoint.journal import Step
from areal_like.types import Batch, Trajectory


@dataclass(eq=False)
class Share:
    """The part of a policy in a step: the run's only policy, or one of several adapters.

    `experience` is its algorithm's input, None without a reward; `batches` are the mini-batches that were
    trained, each `actor.ppo_epochs` times; `stats` are empty if nothing was trained.
    """

    trajectories: list[Trajectory]
    experience: Experience | None = None
    batches: Sequence[Batch] = ()
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class TrainingStep:
    """A training step from `version` to the next; `shares` by adapter, or under "".

    `line` is the journal's, once the step is trained. A hook adds to `measured`, which the step reports.
    """

    version: int
    trajectories: list[Trajectory]
    shares: Mapping[str, Share]
    measured: dict[str, float] = field(default_factory=dict)
    line: Step | None = None

    @property
    def done(self) -> int:
        """The version that the step makes."""
        return self.version + 1


class Hook:
    """A part of the loop that a capability adds, in the order of a step; it overrides what it needs.

    A hook measures its time with `Started.record.phase`. An exception ends the run.
    """

    async def start(self) -> None:
        """Act before the first step of this attempt; the servers have the weights."""

    async def while_waiting(self, step: int, present: Callable[[], Mapping[str, float]]) -> None:
        """Act while the batch of `step` is incomplete; it is cancelled when the batch is complete.

        `present` returns the groups dropped so far in the run, the age of the oldest group, the share of idle servers,
        and how long requests have waited in this step.
        """

    async def before_step(self, step: TrainingStep) -> None:
        """Act when the batch is complete; time-shared servers still have the GPUs."""

    async def before_training(self, step: TrainingStep) -> None:
        """Act before the optimizer steps, which change the trainer's weights."""

    async def after_training(self, step: TrainingStep) -> None:
        """Act when trainers have the new weights and servers the old ones."""

    async def after_publish(self, step: TrainingStep) -> None:
        """Act when servers have the new weights; the journal gets `step.line` afterwards."""

    def derive_metrics(self, step: int, scalars: Mapping[str, float]) -> Mapping[str, float]:
        """Act on the metrics of a step, and return others that follow from them."""
        return {}

    def statistics(self) -> Mapping[str, float]:
        """Return statistics since the last call."""
        return {}
