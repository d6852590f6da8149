"""Differences between the experts chosen for the same tokens."""

import numpy as np
from numpy.typing import NDArray

from areal_like.columns import column_of

ROUTES = "routes"  # the column of experts, which servers return where a capability wants it

type Routes = NDArray[np.integer]
"""`[tokens, layers, chosen]`: the experts of each token as an input."""


def unknown_expert(routes: Routes) -> int:
    """Return the mark of an unknown expert in these routes."""
    return int(column_of(ROUTES, routes).fill_of(routes.dtype))


def differ(one: Routes | None, other: Routes | None) -> bool:
    """Return whether routes differ in any token and layer; none at all are only equal to none."""
    if one is None or other is None:
        return one is not other
    return bool(_differences(one, other).any())


def find_rerouted(scored: Routes, generated: Routes | None) -> NDArray[np.bool]:
    """Return where the pass that gave a token's log-prob chose other experts than its generation, `[tokens, layers]`.

    The log-prob of a token comes from the experts of the token before it. False where the experts are unknown.
    """
    found = np.zeros(scored.shape[:2], bool)
    if generated is not None:
        unknown = unknown_expert(scored)
        known = (scored != unknown).all(axis=2) & (generated != unknown).all(axis=2)
        found[1:] = (_differences(scored, generated) & known)[:-1]
    return found


def _differences(one: Routes, other: Routes) -> NDArray[np.bool]:
    """Return where the sets of experts differ, `[tokens, layers]`: their order means nothing."""
    different: NDArray[np.bool] = (np.sort(one, axis=2) != np.sort(other, axis=2)).any(axis=2)
    return different
