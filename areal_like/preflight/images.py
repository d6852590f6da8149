"""Models of text and images: which trainers take them, and the files that they need."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allocation.diagnostics import Finding
from areal_like.config.findings import finding
from areal_like.preflight.view import RoleView
from areal_like.trainer.fsdp.support import PROCESSOR, SEES_WHOLE_IMAGES, WITH_IMAGES


def check_images(view: RoleView, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a role's model whose config.json, `model`, has a part for text beside others."""
    family, path = model.get("model_type"), view.key("path")
    if family not in WITH_IMAGES:
        looks = ": its image tokens attend to later ones of their image" if family in SEES_WHOLE_IMAGES else ""
        message = f"the model is a {family}, and no test shows that the trainer and the servers compute it alike{looks}"
        help = f"use a model of {', '.join(sorted(WITH_IMAGES))}, or a text-only model"
        yield finding("RUN-IMAGES-FAMILY", path, message, help)
    elif view.backend == "megatron":
        message = f"the Megatron trainer takes no images, and the model is a {family}"
        yield finding("RUN-IMAGES-MEGATRON", view.key("backend"), message, "write an FSDP layout, such as fsdp:d2")
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
