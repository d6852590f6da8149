"""What was generated and what was given, in order, as one trajectory."""

from collections.abc import Sequence

import numpy as np

from areal_like.rollout.pool import Response
from areal_like.types import FinishReason, Floats, Ints, Prompt, Reward, Trajectory

type Part = Response | Sequence[int] | Ints
"""A Response was generated; token ids were not: a prompt, or the output of a tool."""


def joined(prompt: Prompt, group_id: int, parts: Sequence[Part], reward: Reward, sample: int = 0) -> Trajectory:
    """The parts back to back, with at least one Response among them; the last one says why it ended."""
    arrays = [_arrays(part) for part in parts]
    tokens, logprobs, versions = (np.concatenate(column) for column in zip(*arrays, strict=True))
    last = next(part for part in reversed(parts) if isinstance(part, Response))
    return Trajectory(
        sample_id=prompt.sample_id,
        group_id=group_id,
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        finish_reason=last.finish_reason or FinishReason.LENGTH,
        reward=reward.value,
        reward_parts=reward.parts,
        sample=sample,
    )


def _arrays(part: Part) -> tuple[Ints, Floats, Ints]:
    """Tokens, log-probs and versions."""
    if isinstance(part, Response):
        return part.tokens, part.logprobs, part.versions
    tokens = np.asarray(part, np.int32)
    return tokens, np.zeros(len(tokens), np.float32), np.full(len(tokens), -1, np.int32)
