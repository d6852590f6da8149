"""Targets of a layer for multi-token prediction in a packed micro-batch: the token after the next one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_like.core.types import Batch


@dataclass(frozen=True)
class Ahead:
    """`tokens` `[t]` come after each token of a rank, 0 at the end of a sequence; `rows` predict the batch's `targets`.

    A target is the token two places after its row's, in the same sequence.
    """

    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]


def find_ahead(places: NDArray[np.int64], batch: Batch, wanted: NDArray[np.bool]) -> Ahead:
    """Return the tokens after some places of a batch, -1 for padding; targets are among the `wanted` tokens.

    The tokens that follow may be on another rank. Prompts are not shared.
    """
    ends = np.repeat(np.cumsum(batch.lengths), batch.lengths)
    last = len(batch.tokens) - 1
    here = np.maximum(places, 0)
    following, target = np.minimum(here + 1, last), np.minimum(here + 2, last)
    follows = (places >= 0) & (here + 1 < ends[here])
    predicts = follows & (here + 2 < ends[here]) & wanted[target]
    rows = np.flatnonzero(predicts)
    return Ahead(np.where(follows, batch.tokens[following], 0).astype(np.int64), rows, target[rows])
