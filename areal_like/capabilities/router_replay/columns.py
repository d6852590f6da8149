"""The column of experts that were chosen for each token, where servers return it for the trainer to replay.

Routes are one array `[tokens, layers with experts, chosen]`, of the smallest type that holds an expert's number; its
largest value marks a token whose experts are unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.columns import Column, declare

type Routes = NDArray[np.uint8] | NDArray[np.int16]
"""`[tokens, layers, chosen]`: row i has the experts of token i as an input, in each layer that has experts."""

MOST_EXPERTS = int(np.iinfo(np.int16).max)  # one more would be the mark of an unknown one


@dataclass(frozen=True)
class RouteShape:
    """The form in which a model's servers return routes.

    A row has `chosen` of `experts` for each of `layers`, of which those in `with_experts` have any.
    """

    layers: int
    with_experts: tuple[int, ...]
    chosen: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds an expert's number and the mark of an unknown one."""
        return route_type(self.experts)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's experts, without layers that have none."""
        return len(self.with_experts) * self.chosen * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as a server sends it."""
        return self.layers * self.chosen * self.dtype.itemsize

    def read(self, data: bytes, rows: int) -> Routes:
        """Return the rows that a server sent; raise ValueError, with the reason, where they cannot be routes."""
        if len(data) != rows * self.row_bytes:
            raise ValueError(
                f"{len(data)} bytes for {rows} tokens, where {self.layers} layers and {self.chosen} experts of each "
                f"take {self.row_bytes} bytes per token as {self.dtype}"
            )
        routes = np.frombuffer(data, self.dtype).reshape(rows, self.layers, self.chosen)
        if len(self.with_experts) < self.layers:
            routes = routes[:, list(self.with_experts)]
        if not rows:
            return routes
        for number in (int(routes.min()), int(routes.max())):
            if not 0 <= number < self.experts:
                raise ValueError(f"expert {number}, where the model has experts 0 to {self.experts - 1}")
        for row in (routes[0], routes[-1]):
            if self.chosen > 1 and (np.diff(np.sort(row), axis=1) == 0).any():
                raise ValueError("the same expert twice for a token: this model's layers do not report their experts")
        return routes


def route_type(experts: int) -> np.dtype[Any]:
    """Return the smallest type that holds the number of any of `experts` experts, and the mark of an unknown one."""
    return np.dtype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.int16)


def unknown_expert(dtype: np.dtype[Any]) -> int:
    """Return the mark of a token whose experts are unknown."""
    return int(np.iinfo(dtype).max)


def known_routes(routes: Routes) -> NDArray[np.bool]:
    """Return which tokens have known experts in every layer, `[tokens]`."""
    known: NDArray[np.bool] = (routes != unknown_expert(routes.dtype)).all(axis=(1, 2))
    return known


def _request(sampling: Any, known: int) -> Mapping[str, Any] | None:
    if "routes" not in sampling.columns:
        return None
    return {"return_routed_experts": True, "routed_experts_start_len": known}


def _read(piece: Any, rows: int, sampling: Any) -> Routes:
    data = piece.info and piece.info.routed_experts
    if data is None:
        raise ValueError("did not return the experts of each token")
    try:
        routes: Routes = sampling.columns["routes"].read(data, rows)
    except ValueError as problem:
        raise ValueError(f"returned unusable experts of tokens: {problem}") from problem
    return routes


ROUTES = declare(
    Column(
        "routes",
        dtype=None,
        width=None,
        fill=unknown_expert,
        use="input",
        follows_prompt=True,
        sent={"routed_experts": bytes | None},  # base64, with the last tokens
        request=_request,
        reader=_read,
        fix="rollout.router_replay needs the experts of each token. Set rollout.router_replay=off",
    )
)
