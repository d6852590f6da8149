"""Keys of recording, in `recover`."""

from typing import Annotated

from pydantic import Field

from areal_like.core.config.ignored import ignored_if
from areal_like.core.config.section import Section


class ReplayKeys(Section):
    """Recording of training steps, so that `areal-like replay` can compute them again."""

    replay: Annotated[bool, ignored_if("recover.mode", "off")] = False
    """Record every training step in `recover/replay/`: trajectories with all columns, order, micro-batch schedules,
    seeds, statistics, and digests of weights and optimizer state (see [replay](replay.md))."""
    replay_keep: Annotated[int, ignored_if("recover.replay", False)] = Field(100, ge=1)
    """Number of recorded steps to keep. `areal-like check` prints how much disk they may take."""


KEYS = {"recover": ReplayKeys}
