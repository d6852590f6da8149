"""Images in Megatron's language models: the output of the vision tower in the place of image tokens.

The tower is transformers' own, on the first pipeline stage. Every tensor-parallel rank computes it for all images of
the micro-batch, so that its gradients are the same on these ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from areal_like.backends.fsdp.checkpoint_names import empty_model
from areal_like.backends.megatron.bridges.language_part import TOWER
from areal_like.backends.megatron.pack import use_positions
from areal_like.backends.training.image_inputs import ImageReader
from areal_like.core.trainer.device_batch import DeviceImages


def deepened_layers(vision_config: Any) -> int:
    """Return the number of first layers whose output gets features of the tower's inner layers added (DeepStack)."""
    return len(getattr(vision_config, "deepstack_visual_indexes", None) or ())


def enable_inputs(
    chunks: Sequence[torch.nn.Module], path: Path, axes: Tensor | None, *, shared: bool
) -> ImageReader | None:
    """Enable `shared` prompts and images in built chunks; return the reader of images of a model that takes any.

    `axes` are the ModelConfig's. Raises ValueError for gated delta nets that share prompts, and without a processor.
    """
    if shared or axes is not None:
        use_positions(chunks, axes, shared=shared)
    if axes is None:
        return None
    base = empty_model(config := AutoConfig.from_pretrained(path)).base_model
    for chunk in chunks:
        if TOWER in chunk._modules:
            base.visual = chunk.visual
            ImageFeatures(chunk, base)
    return ImageReader(path, config, base.get_rope_index)


def freeze_tower(chunks: Iterable[torch.nn.Module]) -> None:
    """Leave the tower as it is; it has no gradients."""
    for chunk in chunks:
        if (tower := chunk._modules.get(TOWER)) is not None:
            tower.requires_grad_(False)


class ImageFeatures:
    """Puts the features of images into a GPTModel chunk with an embedding; `base` is transformers' model, its tower
    alone with weights."""

    def __init__(self, chunk: torch.nn.Module, base: PreTrainedModel) -> None:
        self._base, self._scattered = base, bool(chunk.config.sequence_parallel)
        self._images: DeviceImages | None = None
        self._deep: list[Tensor] = []
        deep = deepened_layers(base.config.vision_config)
        if deep > len(chunk.decoder.layers) or (deep and chunk.config.recompute_granularity == "full"):
            raise ValueError(
                f"the first {deep} layers, which DeepStack adds to, must be in one stage without recomputation"
            )
        chunk.register_forward_pre_hook(self._receive, with_kwargs=True)
        chunk.embedding.register_forward_hook(self._embed)
        for layer in chunk.decoder.layers[:deep]:
            layer.register_forward_hook(self._deepen)

    def _receive(self, _: torch.nn.Module, inputs: tuple, named: Mapping[str, Any]) -> None:
        """Take the images of the micro-batch that the chunk computes next (`forward.py`)."""
        self._images = named["output_processor_context"][1].images

    def _embed(self, _: torch.nn.Module, inputs: tuple, embedded: Tensor) -> Tensor:
        """Replace the embedding of image tokens, `[t, 1, hidden]` or this rank's share of it."""
        images, self._images = self._images, None
        if images is None:
            raise ValueError("the micro-batch was made without the model's images")
        found = self._base.get_image_features(**images.arguments, return_dict=True)
        rows = images.rows[images.rows >= 0] if images.sampled else images.rows
        at = images.kinds[0].bool()[:, None, None]
        spread = partial(self._spread, at, rows, embedded.dtype)
        self._deep = [spread(features) for features in getattr(found, "deepstack_features", None) or ()]
        return torch.where(self._share(at), spread(torch.cat(found.pooler_output)), embedded)

    def _deepen(self, _: torch.nn.Module, inputs: tuple, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return output[0] + self._deep.pop(0), *output[1:]

    def _spread(self, at: Tensor, rows: Tensor, dtype: torch.dtype, features: Tensor) -> Tensor:
        """Return the `rows` of features at the places of their tokens, zeros elsewhere; this rank's share."""
        whole = features.new_zeros(len(at), 1, features.shape[1], dtype=dtype)
        return self._share(whole.masked_scatter(at, features.index_select(0, rows).to(dtype)))

    def _share(self, whole: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(whole) if self._scattered else whole
