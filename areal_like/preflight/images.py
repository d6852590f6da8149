"""Models of text and images: which trainers take them, and the files that they need."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allocation.diagnostics import Finding
from allocation.parameters import stage_chunks
from areal_like.config.findings import finding
from areal_like.data.processor import SEES_WHOLE_IMAGES
from areal_like.preflight.megatron_settings import megatron_settings
from areal_like.preflight.view import RoleView
from areal_like.trainer.fsdp.support import PROCESSOR, WITH_IMAGES

_SEEN = "its image tokens attend to later tokens of their image"
_FSDP = "an FSDP layout, such as fsdp:d2"
# By family: the number of DeepStack layers whose features SGLang 0.5.17 adds, independent of the model's
# (`sglang/srt/models/qwen3_vl_moe.py`)
DEEPSTACK_SERVED = {"qwen3_vl_moe": 3}


def check_images(view: RoleView, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a role's model whose config.json, `model`, has a part for text beside others."""
    family, path = str(model.get("model_type")), view.key("path")
    whole = family in SEES_WHOLE_IMAGES
    if family not in WITH_IMAGES or (whole and view.backend == "megatron"):
        message = f"the model is a {family}, and no test shows that the trainer and the servers compute it alike"
        if whole:
            message += f": {_SEEN}, which Megatron-core does not support in packed sequences"
        help = f"use a model of {', '.join(sorted(WITH_IMAGES - SEES_WHOLE_IMAGES))}, or a text-only model"
        yield finding("RUN-IMAGES", path, message, help)
    elif view.backend == "megatron":
        yield from _on_megatron(view, family)
    if view.role == "actor":
        yield from _on_servers(view, family)
        if whole:
            yield from _attention(view, family)
    directory = Path(str(view.path))
    if directory.is_dir() and not (directory / PROCESSOR).is_file():
        message = f"{directory} has no {PROCESSOR}, with which the trainer preprocesses images"
        yield finding("RUN-IMAGES", path, message, f"copy {PROCESSOR} from the model's source")


def _on_servers(view: RoleView, family: str) -> Iterator[Finding]:
    """Check the DeepStack layers of a model: SGLang computes a fixed number of them for some families."""
    served, tower = DEEPSTACK_SERVED.get(family), view.model.tower if view.model else None
    if served is None or tower is None or (deep := tower.projections - 1) == served:
        return
    lost = "stops at the first image" if deep < served else f"leaves out the features of the last {deep - served}"
    message = f"config.json, deepstack_visual_indexes: the model has {deep} DeepStack layers, and SGLang computes a "
    message += f"{family} with {served}: its server {lost}"
    help = f"use a {family} with {served} entries in deepstack_visual_indexes, as published ones have, or a qwen3_vl"
    yield finding("RUN-IMAGES", view.key("path"), message, help)


def _attention(view: RoleView, family: str) -> Iterator[Finding]:
    """Check the attention of GPU servers of a model whose image tokens attend to later ones."""
    key, attention = "sglang.attention_backend", view.run.sglang.attention_backend
    if view.device == "cuda" and attention not in (None, "triton"):
        message = f"the model is a {family}: {_SEEN}, which SGLang's {attention} attention does not support"
        yield finding("RUN-IMAGES", key, message, nearest=["triton"])


def _on_megatron(view: RoleView, family: str) -> Iterator[Finding]:
    """Check the settings of a Megatron trainer whose first stage computes the images of a `family`."""
    code, megatron = "RUN-IMAGES", view.engine.megatron
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
