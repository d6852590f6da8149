"""Estimators of the KL divergence from a reference policy, on numpy arrays and torch tensors alike."""

import math
from typing import Any

from areal_like.core.config.schema import KLEstimator

MOST_EXPONENT = 20.0  # e^20 is 5e8: far beyond any use of a ratio, and finite in every data type but float16


def divergence(log_ratio: Any, estimator: KLEstimator) -> Any:
    """Return KL(policy, reference) from samples of the policy, per token; `log_ratio` is log policy - log reference.

    k1 is unbiased and may be negative, k2 is half of its square, biased and never negative, k3 is unbiased and never
    negative. Exponents are limited to MOST_EXPONENT.

    Source: Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    if estimator == "k1":
        return log_ratio
    return (
        log_ratio**2 / 2
        if estimator == "k2"
        else math.e ** (-log_ratio).clip(-MOST_EXPONENT, MOST_EXPONENT) - 1 + log_ratio
    )
