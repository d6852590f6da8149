"""The likely cause of a distance between log-probs of servers and trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_like.core.types import Floats

FEW, MUCH = 0.05, 0.4  # this share of tokens carries that share where few experts differ; of rounding it has 0.2
MOST = 0.8  # of the distance belongs to tokens whose experts explain it
SOME = 0.5  # experts that were chosen otherwise explain a distance if they belong to fewer tokens than this share
GROWTH = 3.0  # factor from the first to the last quarter of the positions where rotary embeddings differ


_ROUTERS = ". Different expert choices of the servers may look the same; rollout.router_replay=on rules them out"


@dataclass(frozen=True)
class Rerouted:
    """Where a server that scores anew chooses other experts than the servers did during generation.

    `flips` is `[tokens, layers with experts]`, and `layers` are the numbers of these layers in the model. `wrong` is
    the column of the layer without whose experts the trainer agrees, where that is known.
    """

    flips: NDArray[np.bool]
    layers: tuple[int, ...]
    wrong: int | None = None


@dataclass(frozen=True)
class Distances:
    """Mean distances of a server from the trainer, scored anew and with its prefix cache.

    `apart` and `positions` are the distance scored anew and the place in its sequence of each token. `rerouted` is
    there where the trainer replays the server's experts. `pairs` is the distance of log-probs after a single token,
    None where it was not measured.
    """

    anew: float
    cached: float
    apart: Floats
    positions: NDArray[np.int64]
    rerouted: Rerouted | None = None
    pairs: float | None = None


def likely_cause(
    found: Mapping[str, Distances], allowed: float, weights: Mapping[str, str] | None, *, has_experts: bool
) -> str:
    """Return the likely cause and remedy, in sentences.

    `weights` has the servers whose weights are not the trainer's; None where they were not compared.
    """
    anew = [name for name, each in found.items() if not each.anew <= allowed]
    if not anew:
        stale = [name for name, each in found.items() if not each.cached <= allowed]
        return (
            f"Likely cause: the prefix cache of {_who(stale, found)}. Recomputed prompts agree, so the "
            "cached ones come from other weights. Try sglang.extra_args.disable_radix_cache=true"
        )
    who = _who(anew, found)
    if weights:
        listed = "; ".join(f"{name}: {what}" for name, what in weights.items())
        return f"Likely cause: the weights of {who}. {listed}. Try another weight_update.mode"
    pattern = _pattern([found[name] for name in anew], allowed, has_experts)
    if weights is None:
        return f"The log-probs of {who} differ even without the prefix cache. {pattern}"
    return f"Likely cause: the computation of {who}, whose weights are the trainer's. {pattern}"


def _pattern(found: Sequence[Distances], allowed: float, has_experts: bool) -> str:
    """Return the cause that the distances of single tokens point to."""
    apart = np.concatenate([each.apart for each in found])
    positions = np.concatenate([each.positions for each in found])
    routed = [each.rerouted for each in found if each.rerouted]
    if routed and (routes := _name_layer(routed, apart)):
        return routes
    if has_experts and not routed and _is_concentrated(apart):
        return (
            "The difference is in few tokens, as if servers and trainer choose different experts there. Try rollout.router_"
            "replay=on, or actor.dtype=float16, which rounds the router's input less"
        )
    pairs = [each.pairs for each in found if each.pairs is not None]
    other = _ROUTERS if has_experts and not routed else ""
    if pairs and max(pairs) <= allowed:
        return (
            "Log-probs after a single token agree, so the difference is in the attention to earlier tokens, as if rotary "
            "embeddings differ (rope_theta, rope_scaling of config.json), or the attention's window or scale. Try the "
            f"other actor.megatron.bridge_type{other}"
        )
    if _grows(apart, positions):
        return (
            "The difference grows with the position in the sequence, as if rotary embeddings differ (rope_theta, "
            f"rope_scaling of config.json). Try the other actor.megatron.bridge_type{other}"
        )
    return (
        "It lies in all tokens alike: a field of config.json that is read differently, or another kernel. Try the other "
        f"actor.megatron.bridge_type, and leave out sglang.extra_args{other}"
    )


def _name_layer(routed: Sequence[Rerouted], apart: Floats) -> str:
    """Return the cause that replayed experts point to, '' where they do not explain the distance."""
    if (wrong := next((each.wrong for each in routed if each.wrong is not None), None)) is not None:
        return (
            f"The experts that the servers return for layer {routed[0].layers[wrong]} are not those that they computed "
            "with: where the trainer's routers choose by themselves from this layer on, it agrees. Try rollout.router_replay="
            "off, which needs no experts from the servers"
        )
    flips = np.concatenate([each.flips for each in routed])
    flipped = flips.any(axis=1)
    explains = flipped.mean() < SOME and apart[flipped].sum() >= MOST * apart.sum()
    if not (explains or _is_concentrated(apart)):
        return ""
    by_layer = flips.sum(axis=0)
    worst = int(by_layer.argmax())
    found = (
        f"the servers chose other experts than during generation for {flipped.sum()} of {len(flipped)} tokens, most "
        f"often in layer {routed[0].layers[worst]} ({by_layer[worst]} tokens)"
        if flipped.any()
        else "the servers chose the same experts as during generation"
    )
    return (
        f"It lies in few tokens: {found}. The trainer chose the experts that the servers returned, so these are not "
        "the ones that they computed with, or single experts differ. Try rollout.router_replay=off, which needs no "
        "experts from the servers"
    )


def _is_concentrated(apart: Floats) -> bool:
    largest = np.sort(apart)[::-1][: max(1, int(len(apart) * FEW))]
    return bool(largest.sum() >= MUCH * apart.sum())


def _grows(apart: Floats, positions: NDArray[np.int64]) -> bool:
    early, late = np.quantile(positions, [0.25, 0.75])
    first, last = apart[positions <= early], apart[positions >= late]
    return bool(late > early and last.mean() > GROWTH * first.mean())


def _who(names: Sequence[str], found: Mapping[str, Distances]) -> str:
    if len(names) == len(found):
        return "every server" if len(found) > 1 else names[0]
    return f"{', '.join(names)} (of {len(found)} servers, the others agree)"
