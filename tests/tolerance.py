"""Tolerances of numeric tests: what rounding may do, by data type, magnitude and depth, with room for other CPUs.

A computation of `depth` layers rounds its numbers that many times and once more at the end, each time by a part of the
data type's epsilon that depends on the order of sums: on vector lengths, fused operations and libraries. Every
tolerance stays below half of 1e-4 of the magnitude, so that no computation passes that is wrong by this much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

LAYERS = 4  # of the deepest tiny model
BACKWARD = 3 * LAYERS  # of its gradients and updates: forward, backward, and the sums over tokens
SEQUENCE = BACKWARD  # of models whose layers may carry a state along the sequence
STATES = 4 * BACKWARD  # of gradients through states that are carried along a sequence
ROOM = 8  # epsilons for each layer; instruction sets were up to 4 apart
LIMIT = 5e-5  # of the magnitude
THOUSAND = 1000  # gradients in an update that is exact to the last bit of a weight
CANCELLED = float(np.finfo(np.float32).eps) / 10  # of gradients whose parts cancel out; a sixth of it was seen
DIFFERENCES = 5e-3  # smaller numbers are differences of numbers around 1
COUNTED = ("lr", "loss_tokens", "skipped", "loss_scale")  # metrics that no forward pass computes


def rounding(magnitude: float = 1.0, depth: int = LAYERS, dtype: Any = np.float32) -> float:
    """Return the distance that rounding may cause between numbers up to `magnitude` behind `depth` layers."""
    relative = ROOM * (depth + 1) * float(np.finfo(dtype).eps)
    if relative > LIMIT:
        raise ValueError(f"a tolerance of {relative:.1e} would hide errors of 1e-4")
    return relative * magnitude


def magnitude_of(values: Any, least: float = 1.0) -> float:
    """Return the largest finite number, at least 1: smaller ones are differences of numbers around 1."""
    known = np.abs(np.asarray(values, np.float64))
    return max(least, float(known[np.isfinite(known)].max(initial=0.0)))


def allowed(values: Any, depth: int) -> float:
    """Return the distance that rounding may cause from numbers; below `LIMIT` of the largest, unless all are small."""
    size = magnitude_of(values, least=0.0)
    most = rounding(max(1.0, size), depth)
    return most if size < DIFFERENCES else min(most, LIMIT * size)


def assert_close(found: Any, expected: Any, depth: int = LAYERS, err_msg: str = "") -> None:
    """Assert that arrays are equal up to rounding; infinite and undefined numbers stand in the same places."""
    found, expected = np.asarray(found), np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=allowed(expected, depth), err_msg=err_msg)


def assert_gradient(
    found: Any, expected: Any, depth: int = BACKWARD, *, is_update: bool = False, err_msg: str = ""
) -> None:
    """Assert that a parameter's gradient is the expected one up to rounding.

    An update is what the optimizer `THOUSANDFOLD` subtracts.
    """
    found, expected = np.asarray(found) / (THOUSAND if is_update else 1), np.asarray(expected)
    size = magnitude_of(expected, least=0.0)
    distance = min(rounding(max(1.0, size), depth), LIMIT * size) + CANCELLED
    np.testing.assert_allclose(found, expected, rtol=0, atol=distance, err_msg=err_msg)


def depth_of(family: str) -> int:
    """Return the depth of the gradients of a family's tiny model."""
    return STATES if family.startswith(("qwen3_5", "qwen3_next")) else BACKWARD


def close_to(expected: Any, depth: int = BACKWARD) -> Any:
    """Return what equals a number, each of several, or the metrics of a step, up to rounding."""
    if isinstance(expected, Mapping):
        return {name: _metric(name, value, depth) for name, value in expected.items()}
    return pytest.approx(expected, rel=0, abs=allowed(expected, depth))


def _metric(name: str, value: Any, depth: int) -> Any:
    if name in COUNTED:
        return pytest.approx(value, rel=rounding(depth=0), abs=0)
    return pytest.approx(value, rel=rounding(depth=depth), abs=0) if name == "grad_norm" else close_to(value, depth)
