"""The column of ids that each token was sampled from, where sampling is truncated.

A list is empty where a token was sampled from the whole vocabulary, or not sampled at all.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.core.columns import Column, Ragged, declare


def _request(sampling: Any, _: int) -> Mapping[str, Any] | None:
    return {"return_sampling_mask": True} if sampling.is_cut else None


def _read(piece: Any, tokens: int, sampling: Any) -> Ragged:
    """Return the kept ids of each token, and write the log-probs over them in place of those over all ids."""
    lists = piece.info and piece.info.output_token_sampling_mask
    kept = Ragged.from_lists([ids or () for ids in lists or ()])
    sampled: NDArray[np.int32] = piece.columns[0]
    _check(kept, sampled, sampling.top_k + 1)  # with a sampled id that rounding left out
    logprobs = piece.info.output_token_sampling_logprobs or ()
    if len(logprobs) != tokens:
        raise ValueError(f"returned {len(logprobs)} log-probs over the ids that {tokens} tokens were sampled from")
    piece.columns[1].view(np.float32)[:] = logprobs
    return kept


def _check(kept: Ragged, sampled: NDArray[np.int32], most: int) -> None:
    """Raise ValueError where ids that tokens were sampled from are missing, or cannot be these."""
    if len(kept) != len(sampled) or not kept.counts.all():
        raise ValueError("does not return the ids that each token was sampled from")
    if (largest := int(kept.counts.max())) > most:
        raise ValueError(f"returned {largest} ids that a token was sampled from, where its top_k is {most - 1}")
    if (smallest := int(kept.ids.min())) < 0:
        raise ValueError(f"returned the id {smallest} among the ids that a token was sampled from")
    found = np.logical_or.reduceat(kept.ids == np.repeat(sampled, kept.counts), kept.ends[:-1])
    if not found.all():
        token = sampled[int(np.argmin(found))]
        raise ValueError(f"sampled the token {token}, which is not among the ids that it reported as kept")


KEPT = declare(
    Column(
        "kept",
        dtype=np.int32,
        ragged=True,
        fill=-1,
        use="sampling",
        sent={
            "output_token_sampling_mask": list[list[int] | None] | None,
            "output_token_sampling_logprobs": list[float] | None,
        },
        request=_request,
        reader=_read,
        fix="The trainer needs the ids that each token was sampled from, for gconfig.top_p, gconfig.top_k and "
        "gconfig.min_p. Set gconfig.top_p=1, gconfig.top_k=-1 and gconfig.min_p=0, and top_p and top_k in no request",
    )
)
