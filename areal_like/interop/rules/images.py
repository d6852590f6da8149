"""Models of text and images: whether this engine trains the model, and a layout that takes images."""

import re

from allocation import compile
from areal_like.interop.rules.translation import MISSING, Translation

_MODELS = re.compile(r"(?i)[-_]vl(?![a-z])|glm-?4[._]?\dv|minicpm-?[ov]|omni|openvla")
_TRAINED = re.compile(r"(?i)qwen2[._]5[-_]vl|qwen3[-_]vl(?!.*-a\d+b)")  # dense models alone
_TEXT_OR_IMAGES = re.compile(r"(?i)qwen3[._]5")  # trained on either, so the data tells
_DATA = re.compile(r"(?i)geo(?:metry)?3k|clevr|mm_eureka|one-rl-to-see|virl39k")
_SUPPORTED = "images are trained with models of Qwen2.5-VL, Qwen3.5 and dense ones of Qwen3-VL (docs/vision.md)"
_RESHARDED = "the trainer is FSDP on the same GPUs; a Megatron layout needs actor.megatron.bridge_type=megatron-bridge"


def sees_images(peer: Translation, model_key: str, data_keys: tuple[str, ...] = (), image_key: str = "") -> bool:
    """Return whether the model is a vision-language model that is trained here; note an unsupported one.

    The model is known by its path, images by the names of the data or by the key of their column, `image_key`.
    """
    named = str(peer.get(model_key))
    model = peer.missing.get("actor.path", "") if named == MISSING else named
    data = [key for key in data_keys if _DATA.search(str(peer.get(key)))]
    has_images = bool(data) or peer.said.get(image_key) is not None
    if _TRAINED.search(model) or (_TEXT_OR_IMAGES.search(model) and has_images):
        _reshard(peer)
        return True
    if _MODELS.search(model):
        peer.changes[model_key] = f"{named}: {_SUPPORTED}"
    elif has_images:
        peer.changes[data[0] if data else image_key] = f"{_SUPPORTED}; the model is {named}"
    return False


def write_rows(peer: Translation, why: str) -> None:
    """Leave images that the other system preprocesses to the user."""
    for section in ("train_dataset", "valid_dataset"):
        if f"{section}.path" in peer.ours:
            peer.fill(f"{section}.path", f"{why}: write the rows as my_data.py:rows (docs/vision.md)")


def _reshard(peer: Translation) -> None:
    """Write an FSDP layout on the GPUs of a Megatron layout, and FSDP's names of Megatron's settings."""
    layout = str(peer.ours.get("allocation_mode"))
    if "megatron" not in layout:
        return
    sizes = next(engine.sizes for engine in compile(layout).engines if engine.role == "actor")
    sizes_text = f"d{sizes.dp * sizes.tp * sizes.pp}" + (f"c{sizes.cp}" if sizes.cp > 1 else "")
    peer.ours["allocation_mode"] = re.sub(r"megatron(\[\w+\])?:(\([^)]*\)|\w+)", rf"fsdp\1:{sizes_text}", layout)
    peer.renamed["layout of the trainer"] = _RESHARDED
    for key in [key for key in peer.ours if ".megatron." in key]:
        role, _, name = key.partition(".megatron.")
        if name == "param_offload" and peer.ours[key] is True:
            peer.ours[f"{role}.offload"] = True
        if name.endswith("moe_aux_loss_coeff") and peer.ours[key]:
            peer.changes[key] = f"{peer.ours[key]}: the trainer is FSDP, which balances experts without this loss"
        if name != "recompute_granularity":  # its name under FSDP is written with the other roles
            del peer.ours[key]
            peer.unneeded[key] = "it is Megatron's, and the trainer is FSDP"
