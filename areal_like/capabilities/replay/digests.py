"""Digests of arrays that say where a single changed element is.

The digest of an array with the bits x[0], x[1], ... is (sum of x[i], sum of (i + 1) * x[i]), modulo 2**64. If one
element changes by d, the sums change by d and (i + 1) * d, so their quotient is its place and d gives its old value.
Elements of 8 bytes count as two of 4. `rank.py` has the same sums for tensors.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 22  # elements that are widened to 64 bits at once
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


class Digest(NamedTuple):
    """Two sums over an array's bits, as signed 64-bit integers, and the number of words that they are over."""

    total: int
    weighted: int
    words: int


@dataclass(frozen=True)
class Change:
    """A changed element: its place in the flat array, and the recorded and the present bits of its word."""

    place: int
    recorded: int
    present: int

    @property
    def flipped_bit(self) -> int | None:
        """The number of the flipped bit, if it is one."""
        different = self.recorded ^ self.present
        return different.bit_length() - 1 if different.bit_count() == 1 else None


def digest(array: NDArray[Any]) -> Digest:
    """Return the digest of an array."""
    words = bits(array)
    total = weighted = np.int64(0)
    with np.errstate(over="ignore"):
        for start in range(0, len(words), CHUNK):
            part = words[start : start + CHUNK].astype(np.int64)
            total += part.sum()
            weighted += (part * np.arange(start + 1, start + 1 + len(part))).sum()
    return Digest(int(total), int(weighted), len(words))


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array's bits as flat unsigned words of at most 4 bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(_WORDS[array.dtype.itemsize])


def locate(recorded: Digest, present: Digest, itemsize: int) -> tuple[int, int] | None:
    """Return the place of the only changed element and the change of its word, None if more elements changed."""
    change, weighted = _wrap(present.total - recorded.total), _wrap(present.weighted - recorded.weighted)
    if recorded.words != present.words or not change or weighted % change:
        return None
    place = weighted // change - 1
    is_word = 0 <= place < present.words and abs(change) < 1 << 8 * min(itemsize, 4)
    return (place // max(1, itemsize // 4), change) if is_word else None


def find_change(recorded: Digest, array: NDArray[Any]) -> Change | None:
    """Return the only element of an array that differs from the recorded one, None if there is not exactly one."""
    found = locate(recorded, digest(array), array.dtype.itemsize)
    if found is None:
        return None
    place, change = found
    words = array.dtype.itemsize // min(array.dtype.itemsize, 4)
    here = bits(array)[place * words : (place + 1) * words]
    changed = next((int(word) for word in here if 0 <= int(word) - change < 1 << 8 * min(array.dtype.itemsize, 4)), 0)
    return Change(place, changed - change, changed)


def _wrap(value: int) -> int:
    """Return a number modulo 2**64 as a signed one."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
