"""What was generated and what was given, in order, as one trajectory."""

from collections.abc import Sequence

import numpy as np

from areal_like.rollout.pool import Response
from areal_like.types import FinishReason, Ints, Prompt, Reward, Trajectory

type Part = Response | Sequence[int] | Ints
"""A Response was generated; token ids were not: a prompt, or the output of a tool."""


def given(tokens: Sequence[int] | Ints) -> Response:
    """Token ids that no model generated, as a part that several trajectories begin with."""
    ids = np.asarray(tokens, np.int32)
    return Response(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))


def joined(prompt: Prompt, group_id: int, parts: Sequence[Part], reward: Reward, sample: int = 0) -> Trajectory:
    """The parts back to back, with at least one Response among them; the last one says why it ended."""
    wholes = [part if isinstance(part, Response) else given(part) for part in parts]
    last = next(part for part in reversed(parts) if isinstance(part, Response))
    return Trajectory(
        sample_id=prompt.sample_id,
        group_id=group_id,
        tokens=np.concatenate([part.tokens for part in wholes]),
        logprobs=np.concatenate([part.logprobs for part in wholes]),
        versions=np.concatenate([part.versions for part in wholes]),
        finish_reason=last.finish_reason or FinishReason.LENGTH,
        reward=reward.value,
        reward_parts=reward.parts,
        sample=sample,
    )
