"""Checks `mb_spec.share_prompts`: models and settings for which the results would differ."""

from collections.abc import Iterable, Iterator

from allocation.diagnostics import Finding
from allocation.families import families_with
from areal_like.config.findings import finding
from areal_like.preflight.view import RoleView

# Families whose routers have biases that Megatron can move
_WITH_ROUTER_BIASES = families_with(lambda family: family.megatron and family.megatron.router_biases)


def check_shared_prompts(views: Iterable[RoleView]) -> Iterator[Finding]:
    """Check that each role can compute a prompt once for several responses, where its key asks for it."""
    reasons: dict[str, tuple[str, str]] = {}
    for view in views:
        if view.engine.mb_spec.share_prompts and (refused := _reason(view)):
            reasons.setdefault(view.key("mb_spec.share_prompts"), refused)
    for key, (code, reason) in reasons.items():
        yield finding(code, key, reason, f"write {key}=false")


def _reason(view: RoleView) -> tuple[str, str] | None:
    """Return the code and the reason why a role cannot share prompts."""
    spec, engine = view.model, view.layout
    if spec is not None and spec.linear_layers:
        return "RUN-SHARED-PROMPTS-LINEAR", "linear attention has no keys that responses could share"
    if engine is None or engine.backend == "fsdp":
        return None
    if spec is not None and spec.latent_attention:
        return (
            "RUN-SHARED-PROMPTS-LATENT",
            "latent attention computes its keys inside a layer, where responses cannot share them",
        )
    options = view.engine.megatron.override_transformer_config
    balancing = options.get("moe_router_load_balancing_type") not in (None, "none") or options.get("moe_z_loss_coeff")
    if spec is not None and spec.family in _WITH_ROUTER_BIASES:
        balancing = balancing or options.get("moe_router_bias_update_rate")
    if spec is not None and spec.experts and balancing:
        reason = "experts are balanced by token counts, in which a shared prompt would count only once"
        return "RUN-SHARED-PROMPTS-EXPERTS", reason
    return None
