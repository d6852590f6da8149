"""The share of generated tokens whose experts the servers returned."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_like.capabilities.router_replay.columns import ROUTES, known_routes
from areal_like.capability import Started
from areal_like.hooks import Hook, TrainingStep
from areal_like.types import Trajectory


class RoutedShare(Hook):
    """Measures the share in each batch."""

    async def before_step(self, step: TrainingStep) -> None:
        """Measure a batch, if any of it has routes."""
        if any(ROUTES in item.columns for item in step.trajectories):
            step.measured["rollout/routed_share"] = measure_share(step.trajectories)


def make_hook(started: Started) -> RoutedShare | None:
    """Return the hook, None where servers return no routes."""
    return RoutedShare() if ROUTES in started.job.served else None


def measure_share(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of generated tokens with log-probs of known experts."""
    return float(np.mean(np.concatenate([_find_routed(item) for item in trajectories])))


def _find_routed(item: Trajectory) -> NDArray[np.bool]:
    """Return the mask of generated tokens with log-probs of known experts, the previous token's."""
    told = item.generated[1:]
    return known_routes(item.columns[ROUTES])[:-1][told] if ROUTES in item.columns else np.zeros(int(told.sum()), bool)
