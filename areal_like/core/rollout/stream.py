"""A reproducible stream over the prompts of one dataset, or of several with weights."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.core.types import Prompt


class PromptStream:
    """Endless passes over the prompts, each in its own seeded order; `stream[place]` is the prompt at a place.

    The order depends on `seed` and the number of the pass only, so a resumed run needs only the place.

    With `weights`, by the prompts' `dataset`, a pass has as many places as there are prompts, and each dataset gets a
    share of the places by its weight, at least one. Every dataset has passes of its own, which continue in the next
    pass of the mixture: a small dataset with a large weight repeats, a large one with a small weight is split over
    passes.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, weights: Mapping[str, float] | None = None
    ) -> None:
        self._prompts, self._shuffle, self._seed = prompts, shuffle, seed
        names = [prompt.dataset for prompt in prompts]
        self._sets = [np.flatnonzero([name == of for of in names]) for name in weights or ()]
        self._shares = shares(list((weights or {}).values()), len(prompts)) if weights else []
        self._order_of = lru_cache(maxsize=2)(self._order)  # the passes that groups are started from

    def row(self, place: int) -> int:
        """Return the number of the prompt at a place, among all prompts."""
        epoch, position = divmod(place, len(self._prompts))
        return self._order_of(epoch)[position]

    def observe(self, rows: Sequence[int], rewards: Sequence[float]) -> None:
        """Note the mean rewards of rows in a step; a stream that chooses prompts by results overrides these methods."""

    def advance(self, version: int) -> None:
        """Note that the servers have a version, and all results before it were observed."""

    def describe(self) -> Mapping[str, Any]:
        """Return values for the journal's line of a step, before its results are observed."""
        return {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the values of a step's line, before its results are observed again."""

    def statistics(self) -> Mapping[str, float]:
        """Return statistics since the last call."""
        return {}

    def __getitem__(self, place: int) -> Prompt:
        return self._prompts[self.row(place)]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, itertools.count())

    def _order(self, epoch: int) -> Sequence[int]:
        if self._sets:
            return self._mix(epoch)
        return self._pass(len(self._prompts), [self._seed, epoch]).tolist()

    def _mix(self, epoch: int) -> Sequence[int]:
        which = np.repeat(np.arange(len(self._sets)), self._shares)
        if self._shuffle:
            which = which[self._pass(len(which), [self._seed, epoch])]
        else:  # spread each set evenly over the pass
            which = which[np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in self._shares]), kind="stable")]
        order = np.empty(len(which), np.int64)
        for number, (members, share) in enumerate(zip(self._sets, self._shares, strict=True)):
            passes, places = np.divmod(np.arange(epoch * share, (epoch + 1) * share), len(members))
            for own in np.unique(passes):
                chosen = self._pass(len(members), [self._seed, int(own), number])[places[passes == own]]
                order[np.flatnonzero(which == number)[passes == own]] = members[chosen]
        return order.tolist()

    def _pass(self, size: int, seeds: Sequence[int]) -> NDArray[np.int64]:
        return np.random.default_rng(seeds).permutation(size) if self._shuffle else np.arange(size)


def shares(weights: Sequence[float], places: int) -> list[int]:
    """Return each set's number of places, at least one; the sum is `places`, with the largest remainders rounded up."""
    exact = np.array(weights) / sum(weights) * places
    counts = np.floor(exact).astype(int)
    for number in np.argsort(counts - exact)[: places - counts.sum()]:
        counts[number] += 1
    while counts.min() == 0 and counts.max() > 1:
        counts[counts.argmin()] += 1
        counts[counts.argmax()] -= 1
    return [int(count) for count in counts]
