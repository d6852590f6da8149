"""Comparison of a recorded step with another one, quantity by quantity, in the order in which they are computed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.capabilities.replay.digests import Digest, locate
from areal_like.capabilities.replay.step_file import INPUTS, SCHEDULE, TRAJECTORIES, StepFile

ROOM = 8  # epsilons for each layer that rounds, as in the equality tests of layouts
BACKWARD = 3  # passes through the layers behind a gradient: forward, backward, update
EPSILONS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass(frozen=True)
class Quantity:
    """A compared quantity: its two values in words, whether they agree, and the distance of numbers."""

    name: str
    recorded: str
    found: str
    agrees: bool
    distance: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.recorded} was recorded, {self.found} was found"


@dataclass(frozen=True)
class Bounds:
    """Bounds of a comparison: equal bits, or a distance that rounding may cause (`relative` to numbers above 1)."""

    relative: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether bits are compared."""
        return self.relative == 0

    def allow(self, distance: float, magnitude: float) -> bool:
        """Return whether a distance between numbers up to `magnitude` is within the bounds."""
        return distance <= self.relative * max(1.0, magnitude)


EXACT = Bounds()


def rounding(layers: int, dtype: str, steps: int) -> Bounds:
    """Return the bounds for a replay in another layout, so many steps after its checkpoint."""
    return Bounds(ROOM * (BACKWARD * layers + 1) * EPSILONS[dtype] * max(1, steps))


def compare(recorded: StepFile, found: StepFile, bounds: Bounds = EXACT) -> list[Quantity]:
    """Return all compared quantities, in the order in which a step computes them."""
    made = [*_arrays(recorded, found, TRAJECTORIES, EXACT), *_arrays(recorded, found, INPUTS, bounds)]
    if bounds.exact:
        made += _digests("batch", recorded.about["batch_digests"], found.about["batch_digests"])
        made += _arrays(recorded, found, SCHEDULE, EXACT)
    made += _statistics(recorded.statistics, found.statistics, bounds)
    return [*made, *_states(recorded, found)] if bounds.exact else made


def first_difference(quantities: list[Quantity]) -> Quantity | None:
    """Return the first quantity that does not agree."""
    return next((each for each in quantities if not each.agrees), None)


def _arrays(recorded: StepFile, found: StepFile, prefix: str, bounds: Bounds) -> Iterator[Quantity]:
    ours, theirs = recorded.part(prefix), found.part(prefix)
    for name in {**ours, **theirs}:
        title = f"{prefix}{name}"
        if name not in ours or name not in theirs:
            yield Quantity(title, _there(name in ours), _there(name in theirs), agrees=False)
        else:
            yield _array(title, ours[name], theirs[name], bounds, recorded)


def _there(there: bool) -> str:
    return "present" if there else "missing"


def _array(name: str, ours: NDArray[Any], theirs: NDArray[Any], bounds: Bounds, step: StepFile) -> Quantity:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Quantity(name, f"{ours.dtype}{list(ours.shape)}", f"{theirs.dtype}{list(theirs.shape)}", agrees=False)
    if ours.tobytes() == theirs.tobytes():
        return Quantity(name, _size(ours), "the same bits", agrees=True, distance=0.0)
    different = np.flatnonzero((ours != theirs) & ~((ours != ours) & (theirs != theirs)))
    place = int(different[0]) if len(different) else 0
    distance, magnitude = math.inf, 1.0
    if ours.dtype.kind == "f":
        apart = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        distance, magnitude = float(np.nanmax(apart)), float(np.nanmax(np.abs(ours)))
    where = describe_place(step, name, place, ours)
    recorded, found = (f"{array.reshape(-1)[place]} {where}" for array in (ours, theirs))
    agrees = not bounds.exact and bounds.allow(distance, magnitude)
    return Quantity(name, recorded, found, agrees, None if distance == math.inf else distance)


def describe_place(step: StepFile, name: str, place: int, array: NDArray[Any]) -> str:
    """Return where the element of an array is: the token of a trajectory, or its number."""
    lengths = step.arrays.get(f"{TRAJECTORIES}lengths")
    if lengths is None or not len(array):
        return f"at {place}"
    row = place // max(1, array.size // len(array))
    if name.startswith(TRAJECTORIES) and len(array) == lengths.sum():
        number = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        return f"at token {row - int(lengths[:number].sum())} of {describe_trajectory(step, number)}"
    if name.startswith(TRAJECTORIES) and len(array) == len(lengths):
        return f"of {describe_trajectory(step, row)}"
    return f"at {place}"


def describe_trajectory(step: StepFile, number: int) -> str:
    """Return which trajectory of a step has a number."""
    group, sample = (int(step.arrays[f"{TRAJECTORIES}{name}"][number]) for name in ("group_id", "sample"))
    return f"trajectory {number} (group {group}, sample {sample})"


def _size(array: NDArray[Any]) -> str:
    return f"{array.size} values"


def _digests(name: str, ours: Any, theirs: Any) -> Iterator[Quantity]:
    """Compare nested digests; a leaf is the list of a Digest."""
    is_leaf = isinstance(ours, list) and len(ours) == 3 and all(isinstance(each, int) for each in ours)
    if is_leaf or type(ours) is not type(theirs) or not isinstance(ours, list | dict):
        yield Quantity(name, f"digest {_short(ours)}", f"digest {_short(theirs)}", agrees=ours == theirs)
    elif isinstance(ours, dict):
        for key in {**ours, **theirs}:
            yield from _digests(f"{name}/{key}" if key else name, ours.get(key), theirs.get(key))
    else:
        if len(ours) != len(theirs):
            yield Quantity(f"{name}/count", str(len(ours)), str(len(theirs)), agrees=False)
        for number, (own, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from _digests(f"{name}/{number}", own, other)


def _short(value: Any) -> str:
    return (
        f"{value[0] & 0xFFFFFFFF:08x}"
        if isinstance(value, list) and value and isinstance(value[0], int)
        else str(value)
    )


def _statistics(ours: Mapping[str, float], theirs: Mapping[str, float], bounds: Bounds) -> Iterator[Quantity]:
    for name in {**ours, **theirs}:
        own, other = ours.get(name), theirs.get(name)
        if own is None or other is None:
            yield Quantity(name, str(own), str(other), agrees=False)
            continue
        same = own == other or (math.isnan(own) and math.isnan(other))
        distance = 0.0 if same else abs(own - other)
        agrees = same or (not bounds.exact and bounds.allow(distance, abs(own)))
        yield Quantity(name, f"{own:.9g}", f"{other:.9g}", agrees, distance)


def _states(recorded: StepFile, found: StepFile) -> Iterator[Quantity]:
    ours, theirs = recorded.states(), found.states()
    for role in {**ours, **theirs}:
        own, other = ours.get(role, []), theirs.get(role, [])
        if len(own) != len(other):
            yield Quantity(f"{role} state", f"{len(own)} ranks", f"{len(other)} ranks", agrees=False)
            continue
        for part in ("params", "optimizer"):
            yield _state(role, part, [rank.get(part, []) for rank in own], [rank.get(part, []) for rank in other])


def _state(role: str, part: str, ours: list[list[Digest]], theirs: list[list[Digest]]) -> Quantity:
    name = f"{role} {'weights' if part == 'params' else 'optimizer state'}"
    count = sum(map(len, ours))
    for rank, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(own) != len(other):
            return Quantity(name, f"{len(own)} tensors in rank {rank}", f"{len(other)}", agrees=False)
        for number, (one, two) in enumerate(zip(own, other, strict=True)):
            if one != two:
                return Quantity(name, f"digest {one.total & 0xFFFFFFFF:08x} of tensor {number} in rank {rank}",
                                f"digest {two.total & 0xFFFFFFFF:08x}{_where(one, two)}", agrees=False)  # fmt: skip
    return Quantity(name, f"{count} tensors", "the same bits", agrees=True, distance=0.0)


def _where(recorded: Digest, found: Digest) -> str:
    place = locate(recorded, found)
    return "" if place is None else f" (only word {place[0]} differs)"
