"""The key of FP8 rollouts, in `rollout`."""

from typing import Literal

from pydantic import Field

from areal_like.config.section import Section


class Fp8Keys(Section):
    """Data type in which servers compute."""

    dtype: Literal["fp8"] | None = Field(None)
    """Data type of the servers' linear layers. `fp8`: weights are rounded in blocks of 128 x 128 before they are sent,
    which needs Hopper GPUs ([FP8 rollouts](weight_updates.md#fp8-rollouts)); null: `actor.dtype`."""


KEYS = {"rollout": Fp8Keys}
