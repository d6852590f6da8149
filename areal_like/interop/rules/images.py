"""Models of text and images: whether this engine trains the model, and the needs of its Megatron layout."""

import re

from areal_like.interop.rules.translation import MISSING, Translation

_MODELS = re.compile(r"(?i)[-_]vl(?![a-z])|glm-?4[._]?\dv|minicpm-?[ov]|omni|openvla")
_DEEP = re.compile(r"(?i)qwen3[-_]vl")  # with DeepStack
_TRAINED = re.compile(r"(?i)qwen2[._]5[-_]vl|qwen3[-_]vl")
_TEXT_OR_IMAGES = re.compile(r"(?i)qwen3[._]5")  # trained on either, so the data tells
_DATA = re.compile(r"(?i)geo(?:metry)?3k|clevr|mm_eureka|one-rl-to-see|virl39k")
_SUPPORTED = "images are trained with models of Qwen2.5-VL, Qwen3-VL and Qwen3.5 (docs/vision.md)"
_SELECTIVE = "selective: recomputed layers would lack the features of images that DeepStack adds; memory grows"


def sees_images(peer: Translation, model_key: str, data_keys: tuple[str, ...] = (), image_key: str = "") -> bool:
    """Return whether the model is a vision-language model that is trained here; note an unsupported one.

    The model is known by its path, images by the names of the data or by the key of their column, `image_key`.
    """
    named = str(peer.get(model_key))
    model = peer.missing.get("actor.path", "") if named == MISSING else named
    data = [key for key in data_keys if _DATA.search(str(peer.get(key)))]
    has_images = bool(data) or peer.said.get(image_key) is not None
    if _TRAINED.search(model) or (_TEXT_OR_IMAGES.search(model) and has_images):
        _keep_megatron(peer, deep=bool(_DEEP.search(model)))
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


def _keep_megatron(peer: Translation, *, deep: bool) -> None:
    """Write the bridge of Megatron layouts; layers to which DeepStack adds features (`deep`) are not recomputed."""
    if "megatron" not in str(peer.ours.get("allocation_mode")):
        return
    roles = {role for role, megatron, _ in (key.partition(".megatron.") for key in peer.ours) if megatron}
    for role in sorted(roles | {"actor"}):
        peer.ours[f"{role}.megatron.bridge_type"] = "megatron-bridge"
        granularity = f"{role}.megatron.recompute_granularity"
        if deep and peer.ours.get(granularity) == "full":
            peer.ours[granularity] = "selective"
            peer.renamed[granularity] = _SELECTIVE
            for name in ("recompute_method", "recompute_num_layers"):
                peer.ours.pop(f"{role}.megatron.{name}", None)
