"""`rollout.router_replay`: whether the trainer's routers choose the experts that the servers chose."""

from collections.abc import Iterator

from allocation import Finding, Plan
from allocation.model_spec import ModelSpec
from areal_like.backends.fsdp.support import REPLAYS_ROUTES
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import RunConfig
from areal_like.core.routes import MOST_EXPERTS, RouteShape

KEY = "rollout.router_replay"
_OVERRIDES = "actor.megatron.override_transformer_config"
_FUSED = "moe_router_fusion"


def find_routes(config: RunConfig, spec: ModelSpec | None, plan: Plan | None) -> tuple[RouteShape | None, str]:
    """Return the form of the routes that servers return; None, and the reason, where none are replayed."""
    if config.rollout.router_replay == "off":
        return None, "rollout.router_replay=off"
    if spec is None:
        return None, "the model's config.json is missing, so its experts are unknown"
    if problem := _problem(config, spec, plan):
        return None, problem[1]
    dense = set(spec.dense_layers)
    layers = tuple(layer for layer in range(spec.layers) if layer not in dense)
    return RouteShape(spec.layers, layers, spec.experts_per_token, spec.experts), ""


def check_router_replay(config: RunConfig, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Check that a run that asks for replay can have it."""
    if config.rollout.router_replay == "on" and spec is not None and (problem := _problem(config, spec, plan)):
        code, message = problem
        yield finding(code, KEY, message, f"write {KEY}=auto", nearest=["auto"])


def _problem(config: RunConfig, spec: ModelSpec, plan: Plan | None) -> tuple[str, str] | None:
    """Return the code and the reason why routes cannot be replayed."""
    if not spec.experts:
        return "RUN-REPLAY-DENSE", "the model has no experts"
    if spec.experts > MOST_EXPERTS:
        message = f"the model has {spec.experts} experts; router replay supports at most {MOST_EXPERTS}"
        return "RUN-REPLAY-EXPERTS", message
    if config.weight_update.adapters:
        message = "no test compares the routes of servers that add adapters to experts (weight_update.adapters)"
        return "RUN-REPLAY-ADAPTERS", message
    if plan is not None and plan.engine("actor").backend == "fsdp":
        if spec.family in REPLAYS_ROUTES:
            return None
        known = ", ".join(sorted(REPLAYS_ROUTES))
        return "RUN-REPLAY-FSDP", f"the FSDP trainer replays routes of {known}, and the model is a {spec.family}"
    overrides = config.actor.megatron.override_transformer_config
    if overrides.get(_FUSED):
        message = f"{_OVERRIDES}.{_FUSED} runs the routers in kernels that cannot replay experts"
        return "RUN-REPLAY-FUSED", message
    return None
