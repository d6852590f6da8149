"""Images in transformers' vision-language models (`AutoModelForImageTextToText`): the tower and its output.

transformers puts one row of the tower's output in the place of each image token. A rank's part of a pack may have the
rows of some images in part, of an image several times, or of none: it gets the rows of its tokens. The tower
always computes at least one image, because its layers are gathered from all ranks together.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.backends.training.image_inputs import ImageReader
from areal_like.core.trainer.device_batch import DeviceBatch, DeviceImages
from areal_like.core.types import Images, Ints


class Vision:
    """Gives a model the images of micro-batches."""

    def __init__(self, model: PreTrainedModel, path: Path) -> None:
        base = model.base_model
        self.reader = ImageReader(path, model.config, getattr(base, "get_rope_index", None))
        self._embedding, self._token = model.get_input_embeddings(), model.config.image_token_id
        self._kinds = "mm_token_type_ids" if hasattr(base, "get_rope_index") else "token_type_ids"
        self._compute, base.get_image_features = base.get_image_features, self._features
        self._images: DeviceImages | None = None

    def arguments(self, micro_batch: DeviceBatch) -> dict[str, Any]:
        """Return the arguments of a model for the images of the micro-batch that comes next."""
        if micro_batch.images is None:
            raise ValueError("the micro-batch was made without the model's images")
        self._images = micro_batch.images
        return {**micro_batch.images.arguments, self._kinds: micro_batch.images.kinds}

    def alone(self, tokens: Ints, images: Images, device: torch.device) -> dict[str, Any]:
        """Return the arguments for one sequence by itself, as transformers' processor makes them."""
        self._images = None
        pictures = [self.reader.read(image).arguments for image in images]
        arguments = {name: torch.cat([each[name] for each in pictures]).to(device) for name in pictures[0]}
        kinds = torch.from_numpy(tokens == self._token).to(device).int()[None]
        return {**arguments, self._kinds: kinds}

    def _features(self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **_: Any) -> Any:
        """Compute images as the model does, and select the rows that the micro-batch's image tokens stand for."""
        grids = {} if image_grid_thw is None else {"image_grid_thw": image_grid_thw}
        found = self._compute(pixel_values, return_dict=True, **grids)
        if (images := self._images) is None:
            return found
        features = found.pooler_output
        whole = features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(features)
        word = self._embedding(images.rows.new_full((1,), self._token)) if images.sampled else None
        chosen = _select(whole, images.rows, word)
        found.pooler_output = chosen[None] if isinstance(features, Tensor) else (chosen,)
        if (deepstack := getattr(found, "deepstack_features", None)) is not None:
            nothing = deepstack[0].new_zeros(1, deepstack[0].shape[1]) if images.sampled else None
            found.deepstack_features = [_select(each, images.rows, nothing) for each in deepstack]
        return found


def _select(features: Tensor, rows: Tensor, word: Tensor | None) -> Tensor:
    """Return the rows of image tokens; a `word` `[1, hidden]` is the row of sampled tokens (-1)."""
    if word is None:
        return features.index_select(0, rows)
    features = torch.cat([features, word.to(features.dtype)])
    return features.index_select(0, torch.where(rows < 0, len(features) - 1, rows))
