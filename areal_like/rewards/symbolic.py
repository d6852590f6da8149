"""Mathematical equality of two answers in LaTeX, by math-verify.

Importing this module builds grammar tables, which takes seconds; the fork server of a `RewardPool` imports it once for
all workers.
"""

import logging

from math_verify import LatexExtractionConfig, parse, verify

# the caller limits the time: math-verify's own limit is an alarm signal, which cannot interrupt long calls in C
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn about the missing limit


def equal(given: str, wanted: str) -> bool:
    """Return whether an answer equals the reference. May take long or never return.

    Only math-verify's LaTeX grammar reads the answers; its other reader would evaluate them as Python.
    """
    parsed = [parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None) for text in (wanted, given)]
    return bool(verify(*parsed, timeout_seconds=None))


equal("x^2 + 1", r"\frac{1}{2}")  # builds the tables and loads the parts of sympy that a first comparison needs
