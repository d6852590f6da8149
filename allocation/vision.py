"""The vision tower of a model of text and images: its parameters, and the activations of images that it keeps for the
backward pass.

Shapes follow transformers 5.12 (`models/{qwen2_5_vl,qwen3_vl,qwen3_5,gemma3,siglip}/modeling_*.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST = 10**7


@dataclass(frozen=True, slots=True)
class Tower:
    """A tower and the projection of its output, which makes one token of `merged` patches.

    `pixels` are the numbers of a patch, `ends` the parameters beside the layers, `projections` the mergers of Qwen.
    `gated` layers have a gated feed-forward layer and norms in float32.
    """

    layers: int
    hidden: int
    ffn: int
    gated: bool
    pixels: int
    merged: int
    ends: int
    projections: int = 0

    @property
    def parameters(self) -> int:
        """All parameters."""
        hidden, ffn = self.hidden, self.ffn
        attention = 4 * hidden * (hidden + 1)
        feed_forward = (3 if self.gated else 2) * hidden * ffn + (2 if self.gated else 1) * ffn + hidden
        return self.layers * (attention + feed_forward + (2 if self.gated else 4) * hidden) + self.ends

    def activations(self, tokens: int, item: int, *, recomputed: bool = False, trained: bool = True) -> int:
        """Return bytes that backward needs of images with so many tokens; an `item` is a number in the data type.

        A layer keeps the inputs and outputs of its norms, queries, keys and values, rotated ones, the output
        of attention, and the steps of its feed-forward layer. `recomputed` layers keep their input, and one keeps all.
        A tower that is not `trained` briefly holds one layer's.
        """
        hidden = self.hidden
        layer = (10 * hidden + (4 if self.gated else 2) * self.ffn) * item + 8 * hidden * self.gated
        if not trained:
            return tokens * self.merged * layer
        layers = self.layers * hidden * item + layer if recomputed else self.layers * layer
        projected = 4 * self.projections * hidden * self.merged * item
        return tokens * (self.merged * (layers + self.pixels * item) + projected)


def read_tower(config: Mapping[str, Any]) -> Tower | None:
    """Return the tower of a config.json; None without one, and for a tower of an unknown kind.

    Raises ValueError that names a wrong field.
    """
    vision = config.get("vision_config")
    read = _KINDS.get(str(config.get("model_type")))
    if vision is None or read is None:
        return None
    if not isinstance(vision, Mapping):
        raise ValueError(f"vision_config must be an object, not {vision!r}")
    known = {**_DEFAULTS[read], **vision}
    for name, usual in (*_DEFAULTS[read].items(), *((key, 0) for key in vision if key == "in_chans")):
        if not isinstance(known[name], type(usual)) or (isinstance(usual, int) and not 0 <= known[name] < _LARGEST):
            kind = "a list" if isinstance(usual, list) else f"a whole number below {_LARGEST:,}"
            raise ValueError(f"vision_config.{name} must be {kind}, not {known[name]!r}")
    return read(known, config)


def _qwen2_5(vision: Mapping[str, Any], config: Mapping[str, Any]) -> Tower:
    hidden, patch, merged = vision["hidden_size"], vision["patch_size"], vision["spatial_merge_size"] ** 2
    pixels = vision.get("in_chans", vision["in_channels"]) * vision["temporal_patch_size"] * patch**2
    ends = hidden * pixels + hidden + _merger(hidden * merged, vision["out_hidden_size"])
    return Tower(vision["depth"], hidden, vision["intermediate_size"], True, pixels, merged, ends, 1)


def _qwen3(vision: Mapping[str, Any], config: Mapping[str, Any]) -> Tower:
    hidden, patch, merged = vision["hidden_size"], vision["patch_size"], vision["spatial_merge_size"] ** 2
    pixels, width = vision["in_channels"] * vision["temporal_patch_size"] * patch**2, hidden * merged
    deep, merger = len(vision["deepstack_visual_indexes"]), _merger(width, vision["out_hidden_size"])
    ends = hidden * (pixels + 1) + vision["num_position_embeddings"] * hidden
    ends += merger + 2 * hidden + deep * (merger + 2 * width)
    return Tower(vision["depth"], hidden, vision["intermediate_size"], False, pixels, merged, ends, 1 + deep)


def _qwen3_5(vision: Mapping[str, Any], config: Mapping[str, Any]) -> Tower:
    return _qwen3({**vision, "deepstack_visual_indexes": []}, config)


def _gemma3(vision: Mapping[str, Any], config: Mapping[str, Any]) -> Tower:
    hidden, ffn = vision["hidden_size"], vision["intermediate_size"]
    pixels = vision["num_channels"] * vision["patch_size"] ** 2
    positions = (vision["image_size"] // max(1, vision["patch_size"])) ** 2
    ends = hidden * (pixels + 1 + positions + 2)  # patches, positions, and the last norm
    if vision["vision_use_head"]:
        ends += hidden + 4 * hidden * (hidden + 1) + 2 * hidden + 2 * hidden * ffn + ffn + hidden
    ends += hidden * ((config.get("text_config") or {}).get("hidden_size", 2304) + 1)
    merged = positions // (config.get("mm_tokens_per_image") or 256)
    return Tower(vision["num_hidden_layers"], hidden, ffn, False, pixels, merged, ends)


def _merger(width: int, out: int) -> int:
    """Return parameters of two linear layers."""
    return width * (width + 1) + (width + 1) * out


# By `model_type`, and the values of fields that a config leaves out
_KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Tower]] = {
    "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "qwen3_vl_moe": _qwen3, "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5, "gemma3": _gemma3,
}  # fmt: skip
_QWEN = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN_3 = {
    **_QWEN, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}  # fmt: skip
_DEFAULTS: dict[Callable[..., Tower], dict[str, Any]] = {
    _qwen2_5: {
        **_QWEN, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "out_hidden_size": 3584,
    },
    _qwen3: {**_QWEN_3, "deepstack_visual_indexes": [8, 16, 24]},
    _qwen3_5: _QWEN_3,
    _gemma3: {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_channels": 3, "image_size": 224,
        "patch_size": 16, "vision_use_head": True,
    },
}  # fmt: skip
