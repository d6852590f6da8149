"""Named axes over ranks: coordinates of a rank, rank of coordinates, and groups as arrays.

Megatron's rank generator (core/parallel_state.py, `generate_masked_orthogonal_rank_groups`) reads an order
string such as `tp-cp-ep-dp-pp` as the digits of a mixed-radix number, leftmost digit fastest. That is an
array whose axes are the tokens from right to left; fixing all other axes leaves a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class RankGrid:
    """All ranks of a world on named axes: `axes` and `sizes` from the innermost (neighbouring ranks) outwards."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def from_order(cls, order: str, sizes: Mapping[str, int]) -> RankGrid:
        """Return a grid in Megatron's order; axes without a size are 1."""
        axes = tuple(order.split("-"))
        return cls(axes, tuple(sizes.get(axis, 1) for axis in axes))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group over `axes`."""
        return math.prod(self.sizes[self.axes.index(axis)] for axis in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on each axis. Raises `ValueError` for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside 0..{self.world_size - 1}")
        position = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank, position[axis] = divmod(rank, size)
        return position

    def rank(self, **coordinates: int) -> int:
        """Return the rank at `coordinates`; axes left out are 0. Raises `ValueError` for one that is off the grid."""
        rank, stride = 0, 1
        if unknown := coordinates.keys() - set(self.axes):
            raise ValueError(f"unknown axis {', '.join(sorted(unknown))}; the axes are {', '.join(self.axes)}")
        for axis, size in zip(self.axes, self.sizes, strict=True):
            position = coordinates.get(axis, 0)
            if not 0 <= position < size:
                raise ValueError(f"{axis} {position} is outside 0..{size - 1}")
            rank, stride = rank + position * stride, stride * size
        return rank

    def groups(self, *axes: str) -> NDArray[np.int64]:
        """Return the rank groups over `axes`, `[groups, size]`, both in Megatron's order."""
        import numpy as np

        if unknown := set(axes) - set(self.axes):
            raise ValueError(f"unknown axis {', '.join(sorted(unknown))}; the axes are {', '.join(self.axes)}")
        ranks = np.arange(self.world_size).reshape(self.sizes[::-1])
        outermost_first = self.axes[::-1]
        fixed = [i for i, axis in enumerate(outermost_first) if axis not in axes]
        inside = [i for i, axis in enumerate(outermost_first) if axis in axes]
        return ranks.transpose(*fixed, *inside).reshape(-1, self.size(*axes))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group over `axes` that contains `rank`."""
        here = self.coordinates(rank)
        ranks, stride = [rank], 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis in axes:
                ranks = [r + (position - here[axis]) * stride for position in range(size) for r in ranks]
            stride *= size
        return tuple(ranks)
