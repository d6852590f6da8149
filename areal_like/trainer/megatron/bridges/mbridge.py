"""mbridge (https://github.com/ISEEKYAN/mbridge) behind the Bridge protocol."""

from collections.abc import Iterator
from pathlib import Path

import torch
from mbridge import AutoBridge
from torch import Tensor

from areal_like.trainer.megatron.bridges.chunks import build_chunks
from areal_like.trainer.megatron.bridges.protocol import ModelSource


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
