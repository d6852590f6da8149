"""What an algorithm is: a value that the loop, the batch and the loss follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_like.types import Floats, Ints, LossSpec, Trajectory

Need = Literal["proximal", "reference", "values"]
"""A forward pass whose result the loss reads as a field: the proximal or reference policy's log-probs, or values."""


@dataclass(frozen=True)
class Algorithm:
    """From scored trajectories to a loss.

    `advantages` makes one number per trajectory out of `rewards` and `groups` (ids), all `[trajectories]`. A group that
    `keeps` says no to is not trained on. `weights`, given `loss_mask` `[tokens]` and `lengths` `[sequences]`, says how
    much each token counts, `[tokens]`; None: all trained tokens count the same.
    """

    advantages: Callable[[Floats, Ints], Floats]
    loss: LossSpec
    needs: frozenset[Need] = frozenset()
    keeps: Callable[[Sequence[Trajectory]], bool] | None = None
    weights: Callable[[Floats, Ints], Floats] | None = None
