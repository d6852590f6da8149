"""The nouns of a run. Arrays are numpy, never padded; torch appears only inside the trainer.

A value per token always describes the token at its own position: `logprobs[i]` is
log p(tokens[i] | tokens[:i]), so it is meaningless (0) for a sequence's first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # the model emitted an end token
    LENGTH = "length"  # max_new_tokens or the context was reached


@dataclass(frozen=True)
class Prompt:
    """One dataset row, ready to be generated from.

    `sample_id` is the row's number in the dataset; `answer` is the row's reference answer.
    """

    sample_id: int
    tokens: Sequence[int]
    answer: str


@dataclass(frozen=True)
class Trajectory:
    """A prompt and one response to it.

    Shapes: `tokens`, `logprobs`, `versions` are `[tokens]`, prompt first. `logprobs` are the behaviour
    policy's (temperature applied) and `versions` the weight version that produced each token; where a token was not
    generated (`versions < 0`) they are 0 and -1. `reward` is None when it is missing (a timed-out or crashed verifier).
    """

    sample_id: int
    group_id: int
    tokens: Ints
    logprobs: Floats
    versions: Ints
    finish_reason: FinishReason
    reward: float | None = None

    @property
    def oldest_version(self) -> int:
        """Version of the oldest generated token; staleness is counted from it."""
        return int(self.versions[self.versions >= 0].min())


@dataclass(frozen=True)
class Batch:
    """Sequences back to back, as the trainer takes them.

    `lengths` is `[sequences]`; `tokens` and each array of `fields` are `[tokens]`, tokens = sum(lengths).
    `fields["loss_mask"]` is 1 where a token is trained on. Other fields are what the loss wants
    (advantages, behaviour log-probs, ...).
    """

    lengths: Ints
    tokens: Ints
    fields: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class LossSpec:
    """Which loss of `areal_like.algorithms.losses.LOSSES` to apply, with its parameters."""

    name: str
    parameters: Mapping[str, float] = field(default_factory=dict)
