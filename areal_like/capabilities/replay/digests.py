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
_COLUMNS = 1 << 10  # of the table that `digest` adds up
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


class Digest(NamedTuple):
    """Two sums over an array's bits, as signed 64-bit integers, and the number of words that they are over."""

    total: int
    weighted: int
    words: int


@dataclass(frozen=True)
class Change:
    """A changed word of an array: its number, its element's place, and its recorded and present bits."""

    word: int
    place: int
    recorded: int
    present: int

    @property
    def flipped_bit(self) -> int | None:
        """The number of the flipped bit in the word, if it is one."""
        different = self.recorded ^ self.present
        return different.bit_length() - 1 if different.bit_count() == 1 else None


def digest(array: NDArray[Any]) -> Digest:
    """Return the digest of an array.

    Word i is in row r and column c of a table: sum of (i + 1) * x[i] = width * sum of r * row[r] + sum of (c + 1) *
    column[c], so that only the sums of rows and columns are weighted.
    """
    words = bits(array)
    table = words[: len(words) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
    rest = words[table.size :].astype(np.uint64)
    rows, columns = (table.sum(axis=axis, dtype=np.uint64) for axis in (1, 0))
    weighted = (
        _COLUMNS * int(rows @ np.arange(len(rows), dtype=np.uint64))
        + int(columns @ np.arange(1, 1 + _COLUMNS, dtype=np.uint64))
        + int(rest @ np.arange(table.size + 1, len(words) + 1, dtype=np.uint64))
    )
    return Digest(_wrap(int(rows.sum()) + int(rest.sum())), _wrap(weighted), len(words))


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array's bits as flat unsigned words of at most 4 bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(_WORDS[array.dtype.itemsize])


def locate(recorded: Digest, present: Digest) -> tuple[int, int] | None:
    """Return the number of the only changed word and its change, None if more words changed."""
    change, weighted = _wrap(present.total - recorded.total), _wrap(present.weighted - recorded.weighted)
    if recorded.words != present.words or not change or weighted % change:
        return None
    word = weighted // change - 1
    return (word, change) if 0 <= word < present.words and abs(change) < 1 << 32 else None


def find_change(recorded: Digest, array: NDArray[Any]) -> Change | None:
    """Return the only word of an array that differs from the recorded one, None if there is not exactly one."""
    words = bits(array)
    found = locate(recorded, digest(array))
    if found is None:
        return None
    word, change = found
    present, most = int(words[word]), np.iinfo(words.dtype).max
    if not 0 <= present - change <= most:
        return None
    return Change(word, word // max(1, array.dtype.itemsize // 4), present - change, present)


def _wrap(value: int) -> int:
    """Return a number modulo 2**64 as a signed one."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
