"""Checks the requirements of adapters alone on the servers (`weight_update.adapters`)."""

from collections.abc import Iterator

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from areal_like.config.findings import finding
from areal_like.config.schema import RunConfig
from areal_like.types import Device

SERVED = ("llama", "mistral", "qwen2", "qwen3")  # families whose adapters tests compare with merged weights
_KEY = "weight_update.adapters"
_MERGED = f"write {_KEY}=false, so that servers receive merged weights"


def check_served_adapters(config: RunConfig, device: Device, spec: ModelSpec | None) -> Iterator[Finding]:
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
    if spec is not None and spec.family not in SERVED:
        message = f"no test shows that SGLang adds an adapter to a {spec.family} as the trainer does"
        yield finding("RUN-ADAPTERS-FAMILY", _KEY, message, f"{_MERGED}, or use a {' or '.join(SERVED)}")
    if config.actor.megatron.use_dist_checkpointing:
        message = (
            "the servers start without the weights of actor.megatron.dist_checkpointing_path and get only adapters"
        )
        yield finding("RUN-ADAPTERS-START", _KEY, message, _MERGED)
    if config.rollout.alternates:
        message = "servers that release their memory (rollout.sharing=alternate) get their weights back from an update"
        yield finding("RUN-ADAPTERS-SHARING", _KEY, message, _MERGED)
    if device == "cuda":
        message = "no test has compared SGLang's adapters with the trainer's on GPUs; watch the drift alarm"
        yield finding("RUN-ADAPTERS-GPU", _KEY, message, _MERGED, severity=Severity.WARNING)
