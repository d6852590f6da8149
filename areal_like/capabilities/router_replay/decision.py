"""`rollout.router_replay`: whether the trainer's routers choose the experts that the servers chose."""

from collections.abc import Iterator, Mapping

from areal_like.capabilities.router_replay.columns import MOST_EXPERTS, ROUTES, RouteShape
from areal_like.capabilities.router_replay.schema import RouterReplayKeys
from areal_like.core.config.keys import with_keys
from areal_like.core.config.schema import RunConfig
from areal_like.exclusions import Feature
from areal_like.job import Job
from areal_like.known import Known

KEY = "rollout.router_replay"
_AUTO, _FUSED = f"{KEY}=auto", "moe_router_fusion"
# Families whose routers give the softmax scores of the experts that they chose, which the FSDP part replaces.
FSDP_FAMILIES = frozenset({"qwen2_moe", "qwen3_moe", "mixtral", "olmoe"})


def _mode(config: RunConfig) -> str:
    return with_keys(config.rollout, RouterReplayKeys).router_replay


def _experts(known: Known) -> int:
    return (known.model.experts or 0) if known.model is not None else 0


def _is_on_fsdp(known: Known) -> bool:
    return known.plan is not None and known.plan.engine("actor").backend == "fsdp"


def _untested_routes(known: Known) -> str | None:
    """Return the family if the FSDP trainer does not replay its routes."""
    spec = known.model
    routed = spec is not None and spec.experts and _is_on_fsdp(known)
    return spec.family if spec and routed and spec.family not in FSDP_FAMILIES else None


def _fuses_routers(known: Known) -> bool:
    options = known.config.actor.megatron.override_transformer_config
    return bool(_experts(known) and options.get(_FUSED)) and not _is_on_fsdp(known)


_replay = Feature[Known]("RUN-REPLAY", f"{KEY}=on", KEY, lambda it: _mode(it.config) == "on" and it.model is not None)
# The first row that holds turns router replay off where it is automatic.
EXCLUDES = (
    _replay.excludes("a dense model", lambda it: not _experts(it), "the model has no experts", _AUTO),
    _replay.excludes("many experts", lambda it: _experts(it) > MOST_EXPERTS and _experts(it),
        f"the model has {{}} experts; router replay supports at most {MOST_EXPERTS}", _AUTO),
    _replay.excludes("weight_update.adapters=true", lambda it: _experts(it) and it.config.weight_update.adapters,
        "no test compares the routes of servers that add adapters to experts", _AUTO),
    _replay.excludes("the FSDP trainer", _untested_routes,
        f"it replays routes of {', '.join(sorted(FSDP_FAMILIES))}, and the model is a {{}}", _AUTO),
    _replay.excludes(f"actor.megatron.override_transformer_config.{_FUSED}", _fuses_routers,
        "the routers run in kernels that cannot replay experts", _AUTO),
)  # fmt: skip


def find_routes(known: Known) -> tuple[RouteShape | None, str]:
    """Return the form of the routes that servers return; None, and the reason, where none are replayed."""
    spec = known.model
    if _mode(known.config) == "off":
        return None, "rollout.router_replay=off"
    if spec is None:
        return None, "the model's config.json is missing, so its experts are unknown"
    for row in EXCLUDES:
        if reason := row.find_reason(known):
            return None, f"{row.excludes.name}: {reason}"
    dense = set(spec.dense_layers)
    layers = tuple(layer for layer in range(spec.layers) if layer not in dense)
    return RouteShape(spec.layers, layers, spec.experts_per_token, spec.experts), ""


def find_served(known: Known) -> Mapping[str, RouteShape]:
    """Return the form of the routes by the name of their column, {} where none are replayed."""
    shape, _ = find_routes(known)
    return {} if shape is None else {ROUTES: shape}


def describe(job: Job) -> Iterator[str]:
    """Describe the replay for a model with experts."""
    model = job.models.get("actor")
    shape = job.served.get(ROUTES)
    if isinstance(shape, RouteShape):
        layers = len(shape.with_experts)
        of = f"{shape.chosen} of {shape.experts} experts in {layers:,} layer{'s' * (layers != 1)}"
        yield f"expert routes: {of}, {shape.token_bytes:,} bytes per token; the actor replays them"
    elif model is None or model.experts:
        _, reason = find_routes(_make_known(job))
        yield f"expert routes are not replayed: {reason} ({KEY})"


def _make_known(job: Job) -> Known:
    models, none = job.models, {}  # type: ignore[var-annotated]
    return Known(
        config=job.config,
        device=job.device,
        plan=job.plan,
        models=models,
        tokenizer=None,
        algorithms=none,
        prompts=none,
        steps=0,
    )
