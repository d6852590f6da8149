"""Extra passes that narrow down the cause for a drift alarm's last message."""

from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from areal_like.capabilities.drift.routes import Routes, unknown_expert
from areal_like.columns import Form, join
from areal_like.errors import ServerError
from areal_like.rollout.sglang.http import Deadline
from areal_like.rollout.sglang.server import Server
from areal_like.trainer.remote import Trainer
from areal_like.types import Batch, Ints

PAIRS = 16


async def measure_pairs(
    server: Server,
    trainer: Trainer,
    tokens: Ints,
    columns: Mapping[str, Form],
    deadline: Deadline,
    adapter: str | None = None,
) -> float | None:
    """Return the mean distance of log-probs after a single token, which attends to nothing else; None if it fails.

    The pairs are neighbours among `tokens`. All requests share the `deadline`.
    """
    places = np.unique(np.linspace(0, len(tokens) - 2, PAIRS).astype(np.int64))
    pairs = [tokens[place : place + 2] for place in places]
    try:
        scores = [
            await server.token_scores(
                pair, deadline.left, start=0, cache=f"pair {place}", columns=columns, adapter=adapter
            )
            for place, pair in zip(places, pairs, strict=True)
        ]
    except ServerError:
        return None
    mask = np.tile(np.array([0, 1], np.float32), len(pairs))
    inputs = join([(2, of_pair) for _, of_pair in scores])
    batch = Batch(np.full(len(pairs), 2, np.int32), np.concatenate(pairs), {"loss_mask": mask, **inputs})
    trained = await trainer.log_probs(batch, 1.0)
    return float(np.abs(trained - np.concatenate([each for each, _ in scores]))[mask > 0].mean())


async def find_wrong_layer(measure: Callable[[Routes], Awaitable[float]], routes: Routes, allowed: float) -> int | None:
    """Return the first layer, as a column of `routes`, with other experts than the log-probs.

    `measure` gives the trainer's distance at some routes. At `routes` it is beyond `allowed`. The layer is known only
    where the trainer agrees if its routers choose all experts by themselves; otherwise the result is None.
    """

    async def agrees(layers: int) -> bool:
        told = routes.copy()
        told[:, layers:] = unknown_expert(routes)
        return await measure(told) <= allowed

    if not await agrees(0):
        return None
    right, wrong = 0, routes.shape[1]  # replaying so many layers agrees, and does not
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if await agrees(middle):
            right = middle
        else:
            wrong = middle
    return right
