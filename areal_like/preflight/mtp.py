"""Checks `megatron.train_mtp_layers`: models and settings with which the layer cannot be trained."""

from collections.abc import Iterator
from pathlib import Path

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from areal_like.backends.megatron.bridges.proven import MTP
from areal_like.core.config.findings import finding
from areal_like.preflight.view import RoleView
from areal_like.preflight.weights import count_layers

_SETTING, _STAGES = "megatron.train_mtp_layers", "pipeline_model_parallel_layout"


def check_mtp(view: RoleView, spec: ModelSpec, layers: int) -> Iterator[Finding]:
    """Check that the actor's layer for multi-token prediction can be trained; note that others' layers are ignored.

    `layers` is the number of such layers that config.json names.
    """
    trains = view.role == "actor" and view.backend == "megatron" and view.engine.megatron.train_mtp_layers
    if trains and (found := _find_missing(view, layers) or _find_unsupported(view, spec, layers)):
        yield found
    if layers and not trains:
        message = f"the model's layers for multi-token prediction ({layers}) are ignored: they are not trained, "
        message += "sent to the servers or saved"
        yield finding("RUN-MTP", view.key("path"), message, severity=Severity.NOTE)


def _find_missing(view: RoleView, layers: int) -> Finding | None:
    """Return the finding that the model has no such layer, by its config.json or by its weights."""
    key, path = view.key(_SETTING), Path(str(view.path))
    message = None
    if not layers:
        message = "config.json of the model has no num_nextn_predict_layers"
    elif view.model is not None and any(path.glob("*.safetensors")) and count_layers(path) == view.model.layers:
        message = f"the weights in {path} have no layer for multi-token prediction, which config.json names"
    if message is None:
        return None
    message = f"{key}=true needs a model with a layer for multi-token prediction; {message}"
    return finding("RUN-MTP-ABSENT", key, message, f"write {key}=false, or name another model in {view.key('path')}")


def _find_unsupported(view: RoleView, spec: ModelSpec, layers: int) -> Finding | None:
    """Return the finding about the first setting that no test covers."""
    key, megatron, sizes = view.key(_SETTING), view.engine.megatron, view.layout.sizes if view.layout else None
    shared, bridge = view.key("mb_spec.share_prompts"), view.key("megatron.bridge_type")
    weights = view.key("megatron.use_dist_checkpointing")
    off = f"write {key}=false"
    reasons = {
        f"trains layers of {', '.join(MTP)}; the model is a {spec.family}": (spec.family not in MTP, off),
        f"trains one layer; the model has {layers}": (layers > 1, off),
        f"needs {bridge}=megatron-bridge": (
            megatron.bridge_type != "megatron-bridge",
            f"write {bridge}=megatron-bridge",
        ),
        "trains all weights of the layer; with actor.use_lora only adapters are trained": (
            bool(view.run.actor.use_lora),
            f"{off}, or actor.use_lora=false",
        ),
        f"needs the token after each token of a prompt; with {shared}=true a prompt has several": (
            view.engine.mb_spec.share_prompts,
            f"write {shared}=false",
        ),
        f"reads the layer from a checkpoint in Hugging Face form; {weights}=true": (
            megatron.use_dist_checkpointing,
            f"write {weights}=false",
        ),
        f"does not support {_STAGES} of megatron.override_transformer_config": (
            megatron.override_transformer_config.get(_STAGES) is not None,
            f"{off}, or leave out {_STAGES}",
        ),
        "does not support virtual pipelines": (
            sizes is not None and sizes.vpp > 1,
            f"{off}, or leave out v in {view.key('backend')}",
        ),
    }
    for rule, (applies, help) in reasons.items():
        if applies:
            return finding("RUN-MTP-UNSUPPORTED", key, f"{key}=true {rule}", help)
    return None
