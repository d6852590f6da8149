"""The workflow that the collector runs for each prompt."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from areal_like.core.types import Ints, Prompt, Reward, Trajectory

type Workflow = Callable[[Prompt, int], Coroutine[Any, Any, list[Trajectory]]]
"""From a prompt and its group's id to the group's trajectories. A smaller id is an older group, to be served first."""

type Score = Callable[[Prompt, Sequence[Ints]], Coroutine[Any, Any, Sequence[Reward]]]
"""One reward for each response to a prompt, all of one group."""
