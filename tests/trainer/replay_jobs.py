"""What ranks do with batches that have routes."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

import numpy as np
from trainer_jobs import Setting, engine, exported, make_batch, make_groups

from areal_like.algorithms.losses import sft
from areal_like.capabilities.router_replay.columns import ROUTES, unknown_expert
from areal_like.trainer.engine import Rendezvous
from areal_like.types import Batch, LossSpec

LAYERS, EXPERTS, CHOSEN = 4, 4, 2  # of the model `moe`


def with_routes(batch: Batch, seed: int = 0, layers: int = LAYERS) -> Batch:
    """Experts drawn at random, as of servers whose router has noise; those of a sequence's last token are unknown.

    Sequences that begin alike have the same experts there, as they would of one server.
    """
    routes = np.empty((len(batch.tokens), layers, CHOSEN), np.uint8)
    for start, length in zip(np.cumsum(batch.lengths) - batch.lengths, batch.lengths, strict=True):
        for place in range(start, start + length):
            rng = np.random.default_rng([seed, *batch.tokens[start : place + 1].tolist()])
            routes[place] = [rng.permutation(EXPERTS)[:CHOSEN] for _ in range(layers)]
    routes[np.cumsum(batch.lengths) - 1] = unknown_expert(routes.dtype)
    return batch.with_field(ROUTES, routes)


@dataclass(frozen=True)
class Replayed:
    """One rank's log-probs of a batch without routes and with them; weights before and after a step (rank 0's).

    `own` are those with the routes that the trainer itself would choose, which are unknown everywhere.
    """

    without: tuple[np.ndarray, np.ndarray] | None
    replayed: tuple[np.ndarray, np.ndarray] | None
    own: tuple[np.ndarray, np.ndarray] | None
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


def replayed_step(
    rendezvous: Rendezvous,
    listener: socket.socket | None,
    setting: Setting,
    groups: bool = False,
    layers: int = LAYERS,
) -> Replayed:
    """Log-probs without and with routes, then a step with them; `groups` are of responses that share prompts."""
    batch = make_groups() if groups else make_batch()
    routed = with_routes(batch, layers=layers)
    routes = routed.fields[ROUTES]
    unknown = np.full_like(routes, unknown_expert(routes.dtype))
    with engine(rendezvous, listener, setting) as made:
        without, replayed = made.log_probs(batch), made.log_probs(routed)
        own = made.log_probs(batch.with_field(ROUTES, unknown))
        before = exported(made)
        made.train(routed, LossSpec(sft))
        after = exported(made)
    if rendezvous.rank:
        before = after = {}
    return Replayed(without, replayed, own, before, after)


def reference_log_probs(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """What a reference gives for a batch without and with routes."""
    with engine(rendezvous, listener, replace(setting, role="ref")) as made:
        return [made.log_probs(make_batch()), made.log_probs(with_routes(make_batch()))]
