"""Which sequences of a batch begin with the same prompt, so that it is computed once for all of them.

The rest of a sequence attends to the prompt's keys and values, whose gradients are added up: the same numbers as with a
prompt for each ("Prefix Grouper", arXiv:2506.05433). No torch, no communication.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_like.types import Batch, Ints


@dataclass(frozen=True)
class Prefixes:
    """`lengths[i]` first tokens of sequence i are those of all sequences of its family, `families[i]`.

    Both are `[sequences]`. Families are neighbours, counted from 0; that of one sequence shares 0 tokens.
    """

    lengths: Ints
    families: Ints

    @property
    def leads(self) -> NDArray[np.bool]:
        """Whether a sequence is the first of its family."""
        return np.diff(self.families, prepend=-1) != 0

    def of(self, sequences: NDArray[np.int64]) -> "Prefixes":
        """Return the families of some sequences, each family whole."""
        return Prefixes(self.lengths[sequences], self.families[sequences])


def alone(n: int) -> Prefixes:
    """Return the families of n sequences that share nothing."""
    return Prefixes(np.zeros(n, np.int32), np.arange(n, dtype=np.int32))


def common_prompts(batch: Batch, *, max_tokens: int, alignment: int) -> Prefixes:
    """Families of neighbours whose tokens before the first that was generated are the same.

    A family that is more than `max_tokens` with every piece padded to `alignment` is cut into several.
    """
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    starts = ends - batch.lengths
    generated = np.append(np.flatnonzero(batch.fields.get("loss_mask", np.empty(0)) > 0), len(batch.tokens))
    first = generated[np.searchsorted(generated, starts)]
    prompts = np.where(first < ends, first - starts, 0)
    owns = -(-(batch.lengths - prompts) // alignment) * alignment

    families, lengths, size, lead = np.zeros(len(ends), np.int32), np.zeros(len(ends), np.int32), 0, 0
    for i, (start, prompt, own) in enumerate(zip(starts.tolist(), prompts.tolist(), owns.tolist(), strict=True)):
        begin = starts[lead]
        alike = prompt and prompt == prompts[lead] and size + own <= max_tokens
        if i and alike and np.array_equal(batch.tokens[start : start + prompt], batch.tokens[begin : begin + prompt]):
            families[i], size = families[i - 1], size + own
            lengths[lead] = lengths[i] = prompt
        else:
            families[i], size, lead = families[i - 1] + (i > 0), -(-prompt // alignment) * alignment + own, i
    return Prefixes(lengths, families)
