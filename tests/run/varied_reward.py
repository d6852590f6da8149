"""A reward that a model without any training gets in part: the share of one digit in a response."""

from __future__ import annotations

from typing import Any


def score(response: str, row: dict[str, Any]) -> float:
    """Return the share."""
    return response.count("1") / max(1, len(response))
