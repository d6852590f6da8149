"""Images of requests, whose tokens are computed as they were sent, with a token for each part of an image.

SGLang 0.5.17 decodes the tokens of a request with images to text, and tokenises that again with the images. The result
may differ from the trained tokens, and an image token that a model has sampled takes an image's place. And its
processors import models whose kernels a CPU does not have. Here only the pixels are computed, by transformers' image
processor on the CPU as the trainer does, and once for the samples of a group.
"""

from __future__ import annotations

import asyncio
import base64
import copy
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import TYPE_CHECKING, Any

from areal_like.backends.sglang.patch import Launch, Patch
from areal_like.data.images import ImageError, decode, image_token
from areal_like.data.processor import FIXED, GRID

if TYPE_CHECKING:
    from torch import Tensor

REMEMBERED = 256  # images whose pixels are kept
READERS = 2  # threads that compute pixels
SAMPLED = 3  # image tokens in a row that a model may have sampled; an image takes more


@dataclass(frozen=True)
class ServedImage:
    """An image as SGLang's model takes it, how many tokens it has, and their rows and columns, () for one size."""

    item: Any
    tokens: int
    shape: tuple[int, ...]


def keep_sent_tokens(family: str) -> None:
    """Compute the images of a family's requests as described above; leave other families as they are."""
    from sglang.srt.managers import tokenizer_manager

    if family not in (*GRID, *FIXED):
        return
    tokenizer_manager.import_processors = lambda *_, **__: None
    tokenizer_manager.get_mm_processor = lambda config, _, processor, *__, **___: SentTokens(config, processor)


class SentTokens:
    """The processor that SGLang's tokenizer manager calls for requests with images, made of a model's own processor."""

    prefer_tokenized_input = True

    def __init__(self, config: Any, processor: Any) -> None:
        self._config, self._processor = config, processor.image_processor
        self._token = image_token(config.to_dict())
        self._pictures: OrderedDict[str, asyncio.Future[ServedImage]] = OrderedDict()
        self._readers = ThreadPoolExecutor(READERS)

    async def process_mm_data_async(self, image_data: Sequence[str], input_text: Sequence[int], **_: Any) -> Any:
        """Return the tokens and images of a request; raise ImageError where they do not fit each other."""
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

        tokens = list(input_text)
        pictures = [await self._picture(encoded) for encoded in image_data]
        starts = find_images(tokens, [picture.tokens for picture in pictures], self._token)
        items = []
        for picture, start in zip(pictures, starts, strict=True):
            item = copy.copy(picture.item)
            item.offsets = [(start, start + picture.tokens - 1)]
            items.append(item)
        made = MultimodalProcessorOutput(items, tokens, im_token_id=self._token)
        made.padded_input_ids = MultimodalProcessorOutput.build_padded_input_ids(tokens, items)
        if self._config.model_type in GRID:
            made.mrope_positions = image_positions(len(tokens), starts, [picture.shape for picture in pictures])
            made.mrope_position_delta = (made.mrope_positions.max() + 1 - len(tokens)).reshape(1, 1)
        return made

    async def _picture(self, encoded: str) -> ServedImage:
        """Return an image's pixels, which are computed once for requests that come together."""
        if encoded not in self._pictures:
            loop = asyncio.get_running_loop()
            self._pictures[encoded] = loop.run_in_executor(self._readers, self._read, encoded)
            if len(self._pictures) > REMEMBERED:
                self._pictures.popitem(last=False)
        try:
            return await asyncio.shield(self._pictures[encoded])
        except ImageError:
            self._pictures.pop(encoded, None)
            raise

    def _read(self, encoded: str) -> ServedImage:
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

        given = dict(self._processor(images=[decode(base64.b64decode(encoded))], return_tensors="pt"))
        grid = given.get("image_grid_thw")
        item = MultimodalDataItem(Modality.IMAGE, feature=given["pixel_values"])
        if grid is None:
            picture = ServedImage(item, self._config.mm_tokens_per_image, ())
        else:
            item.set("image_grid_thw", grid)
            rows, columns = (int(size) // self._config.vision_config.spatial_merge_size for size in grid[0, 1:])
            picture = ServedImage(item, rows * columns, (rows, columns))
        item.set_pad_value()
        return picture


def find_images(tokens: Sequence[int], counts: Sequence[int], wanted: int | None) -> list[int]:
    """Return where images start that take `counts` tokens; raise ImageError where they are not in the tokens.

    Each is a run of so many tokens `wanted`. Shorter runs may stand between them, which a model has sampled.
    """
    starts: list[int] = []
    place = 0
    for is_image, run in groupby(tokens, lambda token: token == wanted):
        length = len(list(run))
        if is_image and len(starts) < len(counts) and length == counts[len(starts)]:
            starts.append(place)
        elif is_image and length > SAMPLED:
            raise ImageError(f"{length} image tokens in a row from token {place} on are not those of an image")
        place += length
    if len(starts) < len(counts):
        raise ImageError(f"the tokens have places for {len(starts)} images of {len(counts)}")
    return starts


def image_positions(length: int, starts: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the positions of tokens in time, height and width (M-RoPE), `[3, length]`, of images `[rows, columns]`."""
    import torch

    parts: list[Tensor] = []
    place = position = 0
    for start, (rows, columns) in zip(starts, shapes, strict=True):
        parts.append(torch.arange(start - place).expand(3, -1) + position)
        position += start - place
        grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
        parts.append(torch.cat([torch.zeros_like(grid[:1]), grid]) + position)
        position += max(rows, columns)
        place = start + rows * columns
    return torch.cat([*parts, torch.arange(length - place).expand(3, -1) + position], dim=1)


def add_positions(request: Any) -> None:
    """Give a request that continues after a retraction the positions of its own tokens, which SGLang leaves out."""
    import torch

    images = getattr(request, "multimodal_inputs", None)
    if images is None or images.mrope_positions is None:
        return
    known, length = images.mrope_positions.shape[1], len(request.origin_input_ids) + len(request.output_ids)
    if known < length:
        more = torch.arange(known, length).expand(3, -1) + images.mrope_position_delta.flatten()
        images.mrope_positions = torch.cat([images.mrope_positions, more.to(images.mrope_positions)], dim=1)


def forget_images() -> None:
    """Remove the embeddings of images, which SGLang keeps by their pixels: other weights give others."""
    from sglang.srt.managers import mm_utils

    if mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()


def renew_images(launch: Launch) -> None:
    """Complete positions of requests as they are queued, and remove embeddings with each change of the weights."""
    if not launch.generates:
        return
    from sglang.srt.managers.scheduler import Scheduler, SchedulerWeightUpdaterManager

    queue, flush = Scheduler._add_request_to_queue, SchedulerWeightUpdaterManager.flush_cache_after_weight_update

    @wraps(queue)
    def queue_complete(self: Any, request: Any, *arguments: Any, **options: Any) -> None:
        add_positions(request)
        queue(self, request, *arguments, **options)

    @wraps(flush)
    def flush_with_images(self: Any, request: Any) -> None:
        flush(self, request)
        forget_images()

    Scheduler._add_request_to_queue = queue_complete
    SchedulerWeightUpdaterManager.flush_cache_after_weight_update = flush_with_images


PATCH = Patch(serve=lambda launch: keep_sent_tokens(launch.model.model_type), schedule=renew_images)
