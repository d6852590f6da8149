"""The ledger of generated tokens: each token is in one place."""

from collections.abc import Mapping
from typing import Protocol

from areal_like.core.rollout.pool import ServerPool


class Counts(Protocol):
    """The counts of a collector, or of the collectors of several adapters."""

    @property
    def tokens_trained(self) -> int: ...

    @property
    def tokens_waiting(self) -> int: ...

    @property
    def tokens_dropped(self) -> int: ...


def token_ledger(pool: ServerPool, collector: Counts, evaluated: int) -> Mapping[str, float]:
    """Return the tokens since the run started or resumed, by place; `generated` is the sum of the others.

    `unfinished` counts ended samples in an unfinished group or evaluation. `orphaned` counts answers that no client has
    read, `unused` tokens that a workflow left out of its trajectories, or behind a stop text.
    """
    finished = {
        "trained": collector.tokens_trained,
        "waiting": collector.tokens_waiting,
        "dropped": collector.tokens_dropped,
        "evaluated": evaluated,
    }
    account = {
        "generated": pool.tokens_generated,
        **finished,
        "unfinished": pool.tokens["delivered"] - sum(finished.values()),
        "in_flight": pool.tokens_generated - pool.tokens.total(),
        "cancelled": pool.tokens["cancelled"],
        "failed": pool.tokens["failed"],
        "orphaned": pool.tokens["orphaned"],
        "unused": pool.tokens["unused"],
    }
    return {f"tokens/{name}": float(value) for name, value in account.items()}
