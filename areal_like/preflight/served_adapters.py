"""Checks the requirements of adapters alone on the servers (`weight_update.adapters`)."""

from collections.abc import Iterator

from allocation.adapters import attention_layers
from allocation.diagnostics import Finding
from allocation.families import families_with
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.config.findings import finding
from areal_like.config.schema import ALL_LINEAR, RunConfig
from areal_like.preflight.lora import FEED_FORWARD
from areal_like.types import Device

# Families whose adapters tests compare with merged weights
SERVED = families_with(lambda family: family.server.adapters and not family.experts)
# Families with experts for which tests do so on GPUs; SGLang has no other kernels for adapters of experts
SERVED_EXPERTS = families_with(lambda family: family.server.adapters and family.experts)
_KEY = "weight_update.adapters"
_TARGETS = "actor.target_modules"
_MERGED = f"write {_KEY}=false, so that servers receive merged weights"


def check_served_adapters(
    config: RunConfig, device: Device, spec: ModelSpec | None, plan: Plan | None
) -> Iterator[Finding]:
    """Check that the servers keep the trainer's frozen weights, and that SGLang adds this adapter to them."""
    update = config.weight_update
    if not update.adapters:
        return
    if not config.actor.use_lora:
        message = "adapters are not trained, because actor.use_lora is false"
        yield finding("RUN-ADAPTERS-LORA", _KEY, message, f"write {_KEY}=false or actor.use_lora=true")
    if update.mode != "disk":
        message = f"adapters are sent as files, and weight_update.mode is {update.mode}"
        yield finding("RUN-ADAPTERS-MODE", "weight_update.mode", message, "write weight_update.mode=disk")
    if update.full_every > 1:
        message = "an adapter is always sent whole, without deltas"
        yield finding("RUN-ADAPTERS-DELTAS", "weight_update.full_every", message, "write weight_update.full_every=1")
    if update.url is not None:
        message = "servers read an adapter below cluster.fileroot, and do not download it"
        yield finding("RUN-ADAPTERS-URL", "weight_update.url", message, "write weight_update.url=null")
    if update.checksum:
        message = "checksums are those of merged weights, which the servers do not have"
        yield finding("RUN-ADAPTERS-CHECKSUM", "weight_update.checksum", message, "write weight_update.checksum=false")
    if spec is not None:
        yield from _check_model(config, device, spec, plan)
    if config.actor.megatron.use_dist_checkpointing:
        message = (
            "the servers start without the weights of actor.megatron.dist_checkpointing_path and get only adapters"
        )
        yield finding("RUN-ADAPTERS-START", _KEY, message, _MERGED)
    if config.rollout.alternates:
        message = "servers that release their memory (rollout.sharing=alternate) get their weights back from an update"
        yield finding("RUN-ADAPTERS-SHARING", _KEY, message, _MERGED)


def _check_model(config: RunConfig, device: Device, spec: ModelSpec, plan: Plan | None) -> Iterator[Finding]:
    """Check that tests compared this family's adapters on such servers, and that SGLang can add these ones."""
    if spec.family not in (*SERVED, *SERVED_EXPERTS):
        message = f"no test shows that SGLang adds an adapter to a {spec.family} as the trainer does"
        yield finding("RUN-ADAPTERS-FAMILY", _KEY, message, f"{_MERGED}, or use {_list((*SERVED, *SERVED_EXPERTS))}")
        return
    if spec.family in SERVED:
        return
    if device == "cpu":
        message = f"SGLang adds adapters to a model with experts ({spec.family}) with kernels for GPUs only"
        yield finding("RUN-ADAPTERS-CPU", _KEY, message, f"{_MERGED}, or use {_list(SERVED)}")
        return
    if spec.latent_attention and not spec.q_rank and _adapts(config, *attention_layers(spec)):
        message = "SGLang adds no adapters to latent attention whose queries are not compressed (q_lora_rank: null)"
        names = ",".join(FEED_FORWARD)
        yield finding("RUN-ADAPTERS-LATENT", _TARGETS, message, f"write {_TARGETS}=[{names}], or {_KEY}=false")
    if _adapts(config, *FEED_FORWARD):
        yield from _check_experts(spec, plan)


def _check_experts(spec: ModelSpec, plan: Plan | None) -> Iterator[Finding]:
    """Check the requirements of SGLang's expert adapters for the model and the layout."""
    if spec.dense_layers and not spec.shared_ffn:
        message = (
            f"layers without experts ({len(spec.dense_layers)} of {spec.layers}) in a model without shared experts "
            "have no adapters in SGLang"
        )
        yield finding("RUN-ADAPTERS-DENSE-LAYERS", _TARGETS, message, _without_experts(spec))
    if plan is not None and (gpus := plan.engine("rollout").sizes.per_replica) > 1:
        message = f"tests compare adapters of experts on servers of one GPU, and the layout has servers of {gpus}"
        yield finding("RUN-ADAPTERS-LAYOUT", _KEY, message, f"{_MERGED}, or use servers of one GPU (rollout.backend)")


def _adapts(config: RunConfig, *names: str) -> bool:
    return not {ALL_LINEAR, *names}.isdisjoint(config.actor.target_modules)


def _without_experts(spec: ModelSpec) -> str:
    return f"write {_TARGETS}=[{','.join(attention_layers(spec))}], or {_KEY}=false"


def _list(families: tuple[str, ...]) -> str:
    return f"{', '.join(families[:-1])} or {families[-1]}"
