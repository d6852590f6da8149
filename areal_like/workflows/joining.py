"""Joins generated and other tokens, in order, to one trajectory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal_like.per_token import Routes, add_rows, join_kept, unknown_routes
from areal_like.rollout.response import Response
from areal_like.types import FinishReason, Floats, Ints, Prompt, Reward, Trajectory

type Part = Response | Sequence[int] | Ints
"""A Response was generated; token ids were not: a prompt, or the output of a tool."""


def as_response(tokens: Sequence[int] | Ints) -> Response:
    """Return token ids that no model generated, as a shared start of several trajectories."""
    ids = np.asarray(tokens, np.int32)
    return Response(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))


def not_trained(response: Response) -> Response:
    """Return a response as tokens that another trajectory trains; it keeps the tokens' routes."""
    return replace(as_response(response.tokens), routes=response.routes)


def join_parts(prompt: Prompt, group_id: int, parts: Sequence[Part], reward: Reward, sample: int = 0) -> Trajectory:
    """Concatenate the parts, at least one of which is a Response; the last Response has the finish reason."""
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
        routes=_join_routes(wholes),
        kept=join_kept([(len(part.tokens), part.kept) for part in wholes]),
        temperatures=join_temperatures([(len(part.tokens), part.temperature) for part in wholes]),
        images=prompt.images,
    )


def join_temperatures(parts: Sequence[tuple[int, float]]) -> Floats | None:
    """Return the temperature of each token from (tokens, temperature) of parts; None if all are the run's."""
    if not any(temperature for _, temperature in parts):
        return None
    return np.repeat(np.array([temperature for _, temperature in parts], np.float32), [tokens for tokens, _ in parts])


def _join_routes(parts: Sequence[Response]) -> Routes | None:
    """Concatenate the routes of parts; a response also has the routes of earlier tokens, unless they are known."""
    rows = [part.routes for part in parts if part.routes is not None]
    if not rows:
        return None
    routes, end, filled = unknown_routes(sum(len(part.tokens) for part in parts), rows[0]), 0, 0
    for part in parts:
        end += len(part.tokens)
        if part.routes is not None:
            filled = add_rows(routes, part.routes, end - 1, filled)
    return routes
