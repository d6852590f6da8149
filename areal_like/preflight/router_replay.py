"""`rollout.router_replay`: whether the trainer's routers choose the experts that the servers chose."""

from areal_like.capability import Known
from areal_like.preflight.exclusions import REPLAY
from areal_like.routes import RouteShape


def find_routes(known: Known) -> tuple[RouteShape | None, str]:
    """Return the form of the routes that servers return; None, and the reason, where none are replayed."""
    spec = known.model
    if known.config.rollout.router_replay == "off":
        return None, "rollout.router_replay=off"
    if spec is None:
        return None, "the model's config.json is missing, so its experts are unknown"
    for row in REPLAY:
        if reason := row.find_reason(known):
            return None, f"{row.excludes.name}: {reason}"
    dense = set(spec.dense_layers)
    layers = tuple(layer for layer in range(spec.layers) if layer not in dense)
    return RouteShape(spec.layers, layers, spec.experts_per_token, spec.experts), ""
