"""mbridge (https://github.com/ISEEKYAN/mbridge) behind the Bridge protocol."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from mbridge import AutoBridge
from mbridge.core import bridge as exporting
from megatron.core import parallel_state
from torch import Tensor

from areal_like.trainer.megatron.bridges.chunks import build_chunks
from areal_like.trainer.megatron.bridges.protocol import ModelSource


def _to_others(tell: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Leave out what a pipeline of one stage tells itself.

    mbridge 0.15.1 does it for each weight, with a dozen waits for the GPU: most of an update's time, and longer where
    a server computes on that GPU too.
    """

    def told(item: Any) -> Any:
        return item if parallel_state.get_pipeline_model_parallel_world_size() == 1 else tell(item)

    return told


for _name in ("broadcast_str_from_megatron_pp", "broadcast_from_megatron_pp"):
    setattr(exporting, _name, _to_others(getattr(exporting, _name)))


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
        self._bridge.set_extra_args(**source.options)

    def build(self) -> list[torch.nn.Module]:
        return build_chunks(self._bridge._model_provider([]), self._source)

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        with torch.no_grad():
            self._bridge.load_weights(models, str(path))

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        seen = set()
        for name, weight in self._bridge.export_weights(models):
            if name not in seen:  # a tied embedding lives on the first and on the last pipeline stage
                seen.add(name)
                yield name, weight.detach()
