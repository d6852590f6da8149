"""Checks `megatron.train_mtp_layers`: models and settings with which the layer cannot be trained."""

from collections.abc import Iterator
from pathlib import Path

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelSpec
from areal_like.core.config.findings import finding
from areal_like.exclusions import find_excluded
from areal_like.preflight.role_exclusions import PREDICTION
from areal_like.preflight.view import RoleView
from areal_like.preflight.weights import count_layers

_SETTING = "megatron.train_mtp_layers"


def check_mtp(view: RoleView, spec: ModelSpec, layers: int) -> Iterator[Finding]:
    """Check that the actor's layer for multi-token prediction can be trained; note that others' layers are ignored.

    `layers` is the number of such layers that config.json names.
    """
    trains = view.role == "actor" and view.backend == "megatron" and view.engine.megatron.train_mtp_layers
    if trains and (missing := _find_missing(view, layers)):
        yield missing
    elif trains:
        yield from find_excluded(PREDICTION, view, view.key)
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
    return finding(
        "RUN-MTP-UNSUPPORTED", key, message, f"write {key}=false, or name another model in {view.key('path')}"
    )
