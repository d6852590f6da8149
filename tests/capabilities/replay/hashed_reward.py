"""A reward that depends on every letter of a response and of its question."""

from __future__ import annotations

import zlib
from typing import Any


def score(response: str, row: dict[str, Any]) -> float:
    """Return a number from 0 to 1."""
    return zlib.crc32(f"{row['question']} {response}".encode()) / 0xFFFFFFFF
