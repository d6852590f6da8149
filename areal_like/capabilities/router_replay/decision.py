"""`rollout.router_replay`: whether the trainer's routers choose the experts that the servers chose."""

from collections.abc import Iterator, Mapping

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.capabilities.router_replay.columns import MOST_EXPERTS, ROUTES, RouteShape
from areal_like.capabilities.router_replay.schema import RouterReplayKeys
from areal_like.capability import Known
from areal_like.config.findings import finding
from areal_like.config.keys import with_keys
from areal_like.config.schema import RunConfig
from areal_like.job import Job

KEY = "rollout.router_replay"
_OVERRIDES = "actor.megatron.override_transformer_config"
_FUSED = "moe_router_fusion"
# Families whose routers give the softmax scores of the experts that they chose, which the FSDP part replaces.
FSDP_FAMILIES = frozenset({"qwen2_moe", "qwen3_moe", "mixtral", "olmoe"})


def find_routes(config: RunConfig, spec: ModelSpec | None, plan: Plan | None) -> tuple[RouteShape | None, str]:
    """Return the form of the routes that servers return; None, and the reason, where none are replayed."""
    if _mode(config) == "off":
        return None, "rollout.router_replay=off"
    if spec is None:
        return None, "the model's config.json is missing, so its experts are unknown"
    if problem := _problem(config, spec, plan):
        return None, problem[1]
    dense = set(spec.dense_layers)
    layers = tuple(layer for layer in range(spec.layers) if layer not in dense)
    return RouteShape(spec.layers, layers, spec.experts_per_token, spec.experts), ""


def find_served(known: Known) -> Mapping[str, RouteShape]:
    """Return the form of the routes by the name of their column, {} where none are replayed."""
    shape, _ = find_routes(known.config, known.model, known.plan)
    return {} if shape is None else {ROUTES: shape}


def server_options(job: Job) -> Mapping[str, object]:
    """Return the options of servers that record the experts of every token."""
    return {"enable-return-routed-experts": ROUTES in job.served}


def check(known: Known) -> Iterator[Finding]:
    """Check that a run that asks for replay can have it."""
    config, spec = known.config, known.model
    if _mode(config) == "on" and spec is not None and (problem := _problem(config, spec, known.plan)):
        code, message = problem
        yield finding(code, KEY, message, f"set {KEY}=auto", nearest=["auto"])


def describe(job: Job) -> Iterator[str]:
    """Describe the replay for a model with experts."""
    model = job.models.get("actor")
    shape = job.served.get(ROUTES)
    if isinstance(shape, RouteShape):
        layers = len(shape.with_experts)
        of = f"{shape.chosen} of {shape.experts} experts in {layers:,} layer{'s' * (layers != 1)}"
        yield f"expert routes: {of}, {shape.token_bytes:,} bytes per token; the actor replays them"
    elif model is None or model.experts:
        _, reason = find_routes(job.config, model, job.plan)
        yield f"expert routes are not replayed: {reason} ({KEY})"


def _mode(config: RunConfig) -> str:
    return with_keys(config.rollout, RouterReplayKeys).router_replay


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
        if spec.family in FSDP_FAMILIES:
            return None
        known = ", ".join(sorted(FSDP_FAMILIES))
        return "RUN-REPLAY-FSDP", f"the FSDP trainer replays routes of {known}, and the model is a {spec.family}"
    overrides = config.actor.megatron.override_transformer_config
    if overrides.get(_FUSED):
        message = f"{_OVERRIDES}.{_FUSED} runs the routers in kernels that cannot replay experts"
        return "RUN-REPLAY-FUSED", message
    return None
