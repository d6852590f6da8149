"""The tolerances of numeric tests have room for rounding, and hide no error of 1e-4."""

from __future__ import annotations

import numpy as np
import pytest
from tolerance import BACKWARD, LAYERS, assert_close, close_to, rounding

VALUES = np.array([-11.3, -5.0, np.nan, -0.2], np.float32)


@pytest.mark.parametrize("depth", [LAYERS, BACKWARD])
@pytest.mark.parametrize("magnitude", [1.0, 5.0, 300.0])
def test_an_error_of_1e_4_of_the_magnitude_is_seen(depth: int, magnitude: float) -> None:
    values = np.linspace(-magnitude, magnitude, 7)
    with pytest.raises(AssertionError):
        assert_close(values + 1e-4 * magnitude, values, depth)
    assert magnitude * (1 + 1e-4) != close_to(magnitude, depth)


def test_the_last_bits_of_a_layer_pass() -> None:
    assert_close(VALUES + 4.3e-6, VALUES)  # as instruction sets differed in two layers
    assert 1 + 8 * np.finfo(np.float32).eps == close_to(1.0)


def test_an_undefined_number_is_not_close() -> None:
    with pytest.raises(AssertionError):
        assert_close(np.nan_to_num(VALUES), VALUES)


def test_a_depth_whose_rounding_would_hide_errors_is_refused() -> None:
    with pytest.raises(ValueError, match="hide"):
        rounding(depth=100)
