"""The comparisons of numbers that would also pass if the number found were wrong by 1e-4.

`ERRORS_SEEN=FILE python -m pytest …` repeats every comparison that passes with what was found times 1 + 1e-4, and
appends the test, the line, the largest number expected and the tolerance of each that passes again to FILE, one JSON
object a line. Numbers that are zero up to rounding are left out: a factor does not change them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

VARIABLE, ERROR = "ERRORS_SEEN", 1e-4
NOTHING = 1e-6
_HERE = os.path.dirname(__file__)


def watch_comparisons(file: str) -> None:
    """Repeat comparisons by numpy, torch and pytest from here on."""
    import torch

    np.testing.assert_allclose = _repeated(np.testing.assert_allclose, file)
    torch.testing.assert_close = _repeated(torch.testing.assert_close, file)
    scalar: Any = type(pytest.approx(1.0))
    equal = scalar.__eq__

    def compare(self: Any, found: Any) -> bool:
        same = bool(equal(self, found))
        if same and _is_number(self.expected) and _is_number(found) and equal(self, found * (1 + ERROR)):
            _record(file, abs(float(self.expected)), {"abs": self.abs, "rel": self.rel})
        return same

    scalar.__eq__ = compare


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        return False
    return math.isfinite(value) and abs(float(value)) > NOTHING


def _repeated(compare: Callable[..., None], file: str) -> Callable[..., None]:
    def repeated(found: Any, expected: Any, *args: Any, **more: Any) -> None:
        __tracebackhide__ = True
        compare(found, expected, *args, **more)
        if (size := _size(expected)) < NOTHING:
            return
        with suppress(AssertionError):
            compare(_scaled(found), expected, *args, **more)
            _record(file, size, {name: more[name] for name in ("rtol", "atol") if name in more})

    return repeated


def _scaled(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return type(found)(_scaled(each) for each in found)
    return found * (1 + ERROR)


def _size(expected: Any) -> float:
    """Return the largest finite number; 0 for flags and for numbers of fewer than 20 bits."""
    if isinstance(expected, list | tuple) and any(not isinstance(each, int | float) for each in expected):
        return max(map(_size, expected), default=0.0)
    array = expected.detach() if hasattr(expected, "detach") else np.asarray(expected)
    if str(array.dtype).removeprefix("torch.") not in ("float32", "float64", "int64"):
        return 0.0
    values = np.abs(np.asarray(array, np.float64))
    return float(values[np.isfinite(values)].max(initial=0.0))


def _record(file: str, size: float, tolerance: dict[str, Any]) -> None:
    frame: Any = sys._getframe(2)
    while frame and not (
        os.path.basename(frame.f_code.co_filename).startswith("test_") and frame.f_code.co_filename.startswith(_HERE)
    ):
        frame = frame.f_back
    line = f"{os.path.relpath(frame.f_code.co_filename, _HERE)}:{frame.f_lineno}" if frame else "?"
    test = os.environ.get("PYTEST_CURRENT_TEST", "?").removesuffix(" (call)")
    row = {"line": line, "test": test, "size": size, **{name: float(value or 0) for name, value in tolerance.items()}}
    with open(file, "a") as out:
        out.write(json.dumps(row) + "\n")
