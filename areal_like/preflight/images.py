"""Models of text and images: which trainers take them, and the files that they need."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allocation.diagnostics import Finding
from allocation.parameters import stage_chunks
from areal_like.config.findings import finding
from areal_like.preflight.megatron_settings import megatron_settings
from areal_like.preflight.view import RoleView
from areal_like.trainer.fsdp.support import PROCESSOR, SEES_WHOLE_IMAGES, WITH_IMAGES

SEEN = "its image tokens attend to later tokens of their image"
IN_TRITON = "only with Triton attention, without CUDA graphs and chunked prefill"
_FSDP = "an FSDP layout, such as fsdp:d2"


def check_images(view: RoleView, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a role's model whose config.json, `model`, has a part for text beside others."""
    family, path = model.get("model_type"), view.key("path")
    if family not in WITH_IMAGES:
        looks = f": {SEEN}, which {_where(view)}" if family in SEES_WHOLE_IMAGES else ""
        message = f"the model is a {family}, and no test shows that the trainer and the servers compute it alike{looks}"
        help = f"use a model of {', '.join(sorted(WITH_IMAGES))}, or a text-only model"
        yield finding("RUN-IMAGES-FAMILY", path, message, help)
    elif view.backend == "megatron":
        yield from _on_megatron(view, str(family))
    directory = Path(str(view.path))
    if directory.is_dir() and not (directory / PROCESSOR).is_file():
        message = f"{directory} has no {PROCESSOR}, with which the trainer preprocesses images"
        yield finding("RUN-IMAGES-PROCESSOR", path, message, f"copy {PROCESSOR} from the model's source")
    if view.role == "actor" and view.run.actor.use_lora and view.run.weight_update.adapters:
        message = (
            "vision-language models need full weight updates: no test shows that their servers apply adapters alone"
        )
        key = "weight_update.adapters"
        yield finding("RUN-IMAGES-ADAPTERS", key, message, f"write {key}=false")


def _where(view: RoleView) -> str:
    """Return which part of a run does not support image tokens that attend to later ones."""
    if view.backend == "megatron":
        return "Megatron-core does not support in packed sequences"
    return f"SGLang supports {IN_TRITON}"


def _on_megatron(view: RoleView, family: str) -> Iterator[Finding]:
    """Check the settings of a Megatron trainer whose first stage computes the images of a `family`."""
    code, megatron = "RUN-IMAGES-MEGATRON", view.engine.megatron
    if megatron.bridge_type != "megatron-bridge":
        key = view.key("megatron.bridge_type")
        message = f"the model is a {family}, and {megatron.bridge_type} converts no model of text and images here"
        yield finding(code, key, message, f"write {key}=megatron-bridge, or {_FSDP}")
    deep = view.model.tower.projections - 1 if view.model and view.model.tower else 0
    if deep < 1 or view.model is None or view.layout is None:
        return
    if megatron.recompute_granularity == "full":
        key = view.key("megatron.recompute_granularity")
        message = f"recomputed layers of a {family} would lack the features of images that DeepStack adds to them"
        yield finding(code, key, message, f"write {key}=selective, or {_FSDP}")
    first = len(stage_chunks(view.model, view.layout.sizes, megatron_settings(view.engine))[0][0])
    if first < deep:
        message = f"DeepStack adds features of images to the first {deep} layers of the {family}, and the first "
        message += f"pipeline stage has {first}"
        yield finding(code, view.key("backend"), message, f"write a smaller p or v, or {_FSDP}")
