"""`mb_spec.share_prompts`: where the numbers would be other ones."""

from collections.abc import Iterator, Mapping

from allocation import EnginePlan, Finding, Plan
from allocation.model_spec import ModelSpec
from areal_like.config.findings import finding
from areal_like.config.schema import EngineConfig, RunConfig, TrainerRole


def check_shared_prompts(
    config: RunConfig, specs: Mapping[TrainerRole, ModelSpec | None], plan: Plan | None
) -> Iterator[Finding]:
    """Why a role cannot compute a prompt once for several responses, under the key that asked for it."""
    reasons: dict[str, tuple[str, str]] = {}
    for role, section in config.roles.items():
        given = config.further_roles.get(role)
        key = f"{'actor' if given and given.mb_spec is None else role}.mb_spec.share_prompts"
        refused = _reason(section, specs.get(role), plan.engine(role) if plan else None)
        if section.mb_spec.share_prompts and refused:
            reasons.setdefault(key, refused)
    for key, (code, reason) in reasons.items():
        yield finding(code, key, reason, f"write {key}=false")


def _reason(section: EngineConfig, spec: ModelSpec | None, engine: EnginePlan | None) -> tuple[str, str] | None:
    """Return the code and the reason why a role cannot share prompts."""
    if spec is not None and spec.linear_layers:
        return "RUN-SHARED-PROMPTS-LINEAR", "linear attention has no keys that responses could share"
    if engine is None or engine.backend == "fsdp":
        return None
    if engine.sizes.cp > 1:
        return (
            "RUN-SHARED-PROMPTS-CONTEXT",
            f"Megatron's context parallelism (c{engine.sizes.cp}) cuts a prompt from its responses",
        )
    if spec is not None and spec.latent_attention:
        return "RUN-SHARED-PROMPTS-LATENT", "keys of latent attention are made from latents inside a layer"
    options = section.megatron.override_transformer_config
    balancing = options.get("moe_router_load_balancing_type") not in (None, "none") or options.get("moe_z_loss_coeff")
    if spec is not None and spec.experts and (spec.expert_bias or balancing):
        reason = "experts are balanced by the tokens that they get, among which a prompt would be once"
        return "RUN-SHARED-PROMPTS-EXPERTS", reason
    return None
