"""mbridge (https://github.com/ISEEKYAN/mbridge) behind the Bridge protocol."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge import AutoBridge
from mbridge.core import bridge as exporting
from megatron.core import parallel_state
from torch import Tensor

from areal_like.backends.megatron.bridges.chunks import build_chunks
from areal_like.backends.megatron.bridges.protocol import ModelSource


class _Stages:
    """Keeps mbridge's messages about weights between pipeline stages, which are always the same.

    mbridge 0.15.1 asks at every export, also within one stage, and waits for the GPU a dozen times for each weight:
    most of an update's time, and longer where a server computes on that GPU.
    """

    def __init__(self) -> None:
        self._said: list[list[Any]] = []
        self._next = 0

    def begin(self) -> None:
        """Reset the count: from here on mbridge asks for the first weight, the second, ..."""
        self._next = 0
        exporting.broadcast_str_from_megatron_pp = self._name
        exporting.broadcast_from_megatron_pp = self._weight

    def _name(self, name: str | None) -> str | None:
        return self._owner(name)[1]

    def _weight(self, weight: Tensor | None) -> Tensor:
        """Broadcast the weight of one stage to all of them."""
        fields = ("tensor_model_parallel", "partition_dim")
        stage, (shape, dtype, said) = self._owner(
            None if weight is None else (weight.shape, weight.dtype, [getattr(weight, name, None) for name in fields])
        )
        if weight is None:
            weight = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
            for name, value in zip(fields, said, strict=True):
                setattr(weight, name, value)
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            dist.broadcast(weight, group=group, group_src=stage)
        return weight

    def _owner(self, mine: Any) -> tuple[int, Any]:
        """Return the sending stage and its tensor."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return 0, mine
        if self._next == len(self._said):
            self._said.append([None] * group.size())
            dist.all_gather_object(self._said[-1], mine, group=group)
        self._next += 1
        return next((stage, it) for stage, it in enumerate(self._said[self._next - 1]) if it is not None)


class MBridge:
    """Builds, loads and exports models of the families that mbridge registers."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        config = source.config.for_bridge
        # mbridge pads the vocabulary only when asked; each tensor-parallel rank needs an equal share
        self._bridge = AutoBridge.from_config(config, dtype=source.dtype, make_vocab_size_divisible_by=source.sizes.tp)
        tied = getattr(config, "tie_word_embeddings", False)
        # mbridge notes a tied head in the class's table, which a later untied model would inherit
        self._bridge._DIRECT_MAPPING = {
            **self._bridge._DIRECT_MAPPING,
            "output_layer.weight": "model.embed_tokens.weight" if tied else "lm_head.weight",
        }
        self._bridge.set_extra_args(fp16=source.dtype == torch.float16, **source.options)
        self._stages = _Stages()

    def build(self) -> list[torch.nn.Module]:
        return build_chunks(self._bridge._model_provider([]), self._source)

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        with torch.no_grad():
            self._bridge.load_weights(models, str(path))

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        self._stages.begin()
        seen = set()
        for name, weight in self._bridge.export_weights(models):
            if name not in seen:  # a tied embedding lives on the first and on the last pipeline stage
                seen.add(name)
                yield name, weight.detach()
