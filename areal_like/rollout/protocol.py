"""The workflow that the collector runs for each prompt, and the factory of a run's workflows."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from areal_like.config.schema import EvaluationConfig
from areal_like.rollout.sample import Sampling
from areal_like.types import Ints, Prompt, Reward, Trajectory

type Workflow = Callable[[Prompt, int], Coroutine[Any, Any, list[Trajectory]]]
"""From a prompt and its group's id to the group's trajectories. A smaller id is an older group, to be served first."""

type Score = Callable[[Prompt, Sequence[Ints]], Coroutine[Any, Any, Sequence[Reward]]]
"""One reward for each response to a prompt, all of one group."""


class MakesWorkflows(Protocol):
    """A factory of workflows for training and evaluation."""

    def train(self, sampling: Sampling, n_samples: int, seed: int | None = None) -> Workflow:
        """Return the run's workflow with `n_samples` per prompt, which depend on `seed` if it is set."""

    def evaluate(self, data: EvaluationConfig, sampling: Sampling, n_samples: int) -> Workflow:
        """Return the workflow of an evaluation set."""

    def counts(self) -> Mapping[str, float]:
        """Return counts since the last call, by the names of their metrics."""
