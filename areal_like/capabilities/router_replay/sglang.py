"""Experts of every token, as SGLang 0.5.17 records them, for all families and in less memory.

SGLang records int32, and keeps as much for each slot of the KV cache in pinned memory of the host, which a machine
without CUDA does not have. Here both buffers have the smallest type that holds an expert's number, as in answers: a
quarter of the bytes for up to 255 experts.
"""

import re
from functools import wraps
from typing import Any

from areal_like.capabilities.router_replay.columns import route_type

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")  # names in configs of model families


def prepare_scheduler(server: Any) -> None:
    """Prepare a scheduler's process for the routes, if the server returns any; `server` are its ServerArgs."""
    if server.enable_return_routed_experts:
        record_compactly(server)
        number_routers()


def record_compactly(server: Any) -> None:
    """Record experts in small types in a scheduler that has not started; `server` are its ServerArgs."""
    import torch
    from sglang.srt.state_capturer import base

    config = server.get_model_config().hf_text_config
    experts = next(count for name in _COUNTS if (count := getattr(config, name, None)))
    dtype = getattr(torch, str(route_type(experts)))

    class HostCache(base.BaseHostCache):
        def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
            size = (num_tokens, num_layers, topk_size)
            self.buffer = torch.zeros(size, dtype=dtype, pin_memory=torch.cuda.is_available())
            self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    class DeviceCache(base.BaseDeviceCache):
        def __init__(self, max_batch_size: int, num_layers: int, topk_size: int, device: str, name: str) -> None:
            self.buffer = torch.zeros((max_batch_size, num_layers, topk_size), dtype=dtype, device=device)
            self.num_layers, self.topk_size, self.name = num_layers, topk_size, name

    base.BaseHostCache, base.BaseDeviceCache = HostCache, DeviceCache


def number_routers() -> None:
    """Number the routers of a model after it is loaded, as SGLang records their choices by layer.

    SGLang builds the routers of some families without a layer (mixtral, olmoe and minimax_m2 among others), and then
    its recorder raises at the first token.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    load = ModelRunner.load_model

    @wraps(load)
    def load_and_number(self: Any) -> None:
        load(self)
        number_modules(self.model)

    ModelRunner.load_model = load_and_number


def number_modules(model: Any) -> None:
    """Set `layer_id` of every router that has none, from the name of its module."""
    from sglang.srt.layers.moe.topk import TopK

    for name, module in model.named_modules():
        if isinstance(module, TopK) and module.layer_id is None and (layer := _LAYER.search(name)):
            module.layer_id = int(layer[1])
