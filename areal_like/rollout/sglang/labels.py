"""The weight version of each token, as a server labels them (`versions.py`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LABELS = "token_weight_versions"

type Runs = Sequence[tuple[str | None, int]]
"""Labels of successive tokens, and how many tokens have each."""


class TokenLabels:
    """Labels of one request's tokens, which SGLang's streamer slices like a list; a token adds nothing to them."""

    def __init__(self, label: str) -> None:
        self._starts, self._labels = [0], [label]

    def begin(self, first: int, label: str) -> None:
        """Label the tokens from number `first` on."""
        self._starts.append(first)
        self._labels.append(label)

    def __getitem__(self, part: slice) -> list[str]:
        """Return the labels of tokens `part.start` to `part.stop`."""
        labels: list[str] = []
        for label, start, end in zip(self._labels, self._starts, [*self._starts[1:], part.stop], strict=True):
            labels += [label] * (min(end, part.stop) - max(start, part.start))  # a negative number of times is none
        return labels


class WrongLabels(ValueError):
    """A server did not label each of an answer's tokens with a version."""


def token_versions(runs: Runs, tokens: int) -> NDArray[np.int32]:
    """Return the version of each of an answer's `tokens`, `[tokens]`.

    Raises WrongLabels where the labels are not that many whole numbers, none smaller than the one before.
    """
    counts = [count for _, count in runs]
    if sum(counts) != tokens:
        raise WrongLabels(f"labelled {sum(counts)} tokens of {tokens} with their weight version")
    result, end = np.empty(tokens, np.int32), 0
    try:
        versions = [int(label) for label, _ in runs]  # type: ignore[arg-type]  # None is a TypeError
        for version, count in zip(versions, counts, strict=True):
            result[end : end + count] = version
            end += count
    except (TypeError, ValueError, OverflowError):
        said = ", ".join(str(label) for label, _ in runs)[:80]
        raise WrongLabels(f"labelled tokens with {said}, which are not weight versions") from None
    if versions != sorted(versions):
        raise WrongLabels("labelled tokens with an older weight version than tokens before them")
    return result
