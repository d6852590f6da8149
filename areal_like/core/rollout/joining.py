"""Joins generated and other tokens, in order, to one trajectory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from areal_like.core.columns import column_of, join
from areal_like.core.rollout.sample import Response
from areal_like.core.types import FinishReason, Ints, Prompt, Reward, Trajectory

type Part = Response | Sequence[int] | Ints
"""A Response was generated; token ids were not: a prompt, or the output of a tool."""


def as_response(tokens: Sequence[int] | Ints) -> Response:
    """Return token ids that no model generated, as a shared start of several trajectories."""
    ids = np.asarray(tokens, np.int32)
    return Response(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))


def not_trained(response: Response) -> Response:
    """Return a response as tokens that another trajectory trains; it keeps its columns of inputs."""
    return replace(as_response(response.tokens), inputs=response.inputs)


def join_parts(prompt: Prompt, group_id: int, parts: Sequence[Part], reward: Reward, sample: int = 0) -> Trajectory:
    """Concatenate the parts, which include a Response; the last Response has the finish reason."""
    wholes = [part if isinstance(part, Response) else as_response(part) for part in parts]
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
        columns=join_columns(wholes),
        images=prompt.images,
    )


def join_columns(parts: Sequence[Response]) -> dict[str, Any]:
    """Join the columns of parts; a response also has columns of inputs before it, unless they were known."""
    inputs, filled, end = dict[str, Any](), Counter[str](), -1  # of the last token's place
    for part in parts:
        end += len(part.tokens)
        for name, rows in part.inputs.items():
            if name not in inputs:
                inputs[name] = column_of(name, rows).empty(sum(len(each.tokens) for each in parts), rows)
            first = max(end - len(rows), filled[name])  # known rows stay: their tokens were computed with them
            if first < end:
                inputs[name][first:end] = rows[len(rows) - (end - first) :]
                filled[name] = end
    return join([(len(part.tokens), part.columns) for part in parts]) | inputs
