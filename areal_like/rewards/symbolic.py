"""Are two answers in LaTeX mathematically equal? By math-verify.

Importing this module takes seconds, grammar tables and all; the forkserver of a `RewardPool` does it once, for all its
workers.
"""

import logging

from math_verify import LatexExtractionConfig, parse, verify

# the caller limits the time: math-verify's own limit is an alarm signal, which long calls in C do not heed
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn of that at every first call


def equal(given: str, wanted: str) -> bool:
    """Return whether an answer equals the reference. May take long or for ever.

    Only math-verify's LaTeX grammar reads the answers; its other reader would evaluate them as Python.
    """
    parsed = [parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None) for text in (wanted, given)]
    return bool(verify(*parsed, timeout_seconds=None))


equal("x^2 + 1", r"\frac{1}{2}")  # builds the tables and loads the parts of sympy that a first comparison needs
