"""Libraries that convert between Hugging Face and Megatron, behind one protocol; each is imported only when chosen."""

import json

from areal_like.backends.megatron.bridges.language_part import language_part
from areal_like.backends.megatron.bridges.protocol import Bridge, ModelSource
from areal_like.backends.megatron.bridges.support import bridge_problems
from areal_like.core.gc_tuning import pause_gc


def make_bridge(bridge_type: str, source: ModelSource) -> Bridge:
    """Return the bridge named by `actor.megatron.bridge_type`, for a model that is trained with it.

    Raises ValueError for a model or a layout that the bridge cannot serve, and ModuleNotFoundError when its library is
    not installed.
    """
    config = json.loads((source.path / "config.json").read_text())
    if problems := list(bridge_problems(bridge_type, language_part(config), source.sizes)):
        raise ValueError("; ".join(f"{p.field}: {p.message}; {p.remedy}" for p in problems))
    return open_bridge(bridge_type, source)


def open_bridge(bridge_type: str, source: ModelSource) -> Bridge:
    """Return a bridge for a model that is only converted, without the check that it computes the same as Hugging
    Face."""
    bridge: Bridge
    if bridge_type == "mbridge":
        with pause_gc():
            from areal_like.backends.megatron.bridges.mbridge import MBridge

        bridge = MBridge(source)
    else:
        with pause_gc():
            from areal_like.backends.megatron.bridges.megatron_bridge import MegatronBridge

        bridge = MegatronBridge(source)
    if source.config.axes is not None:
        if bridge_type == "mbridge":
            raise ValueError("mbridge converts models of text alone here; use megatron-bridge")
        from areal_like.backends.megatron.bridges.vision import VisionBridge

        bridge = VisionBridge(bridge, source)
    if source.value_head:
        from areal_like.backends.megatron.bridges.value_head import ValueBridge

        bridge = ValueBridge(bridge, source)
    return bridge
