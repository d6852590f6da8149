"""Images as inputs of a model: the pixels of a micro-batch's images, and for each image token the part it stands for.

Pixels are made in the rank, with transformers' image processor of the model and only for the micro-batch's own images.
An image that several sequences of a micro-batch have is computed once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_like.core.columns import Column, declare
from areal_like.core.trainer.device_batch import ImageInputs
from areal_like.core.types import Batch, Images, Ints
from areal_like.data.images import ImageError, decode, draw

SAMPLED = 3  # image tokens in a row that a model may have sampled, which are words as any other; an image takes more
_REMEMBERED = 64  # images whose pixels are kept for the passes of a step
_DUMMY = (32, 32)  # pixels of the image that a micro-batch without images has

IMAGE_MARKS = declare(Column("image_marks", np.int32, use="input"))  # equal tokens of other images are other inputs

type RopeIndex = Callable[..., tuple[Tensor, Tensor]]
"""`get_rope_index` of a model with positions in three dimensions (M-RoPE)."""


@dataclass(frozen=True)
class ProcessedImage:
    """An image as its processor gives it: arguments of the model, and the number of its tokens."""

    arguments: Mapping[str, Tensor]
    tokens: int


@dataclass(frozen=True)
class ImageRun:
    """Image tokens of one image, from `start` to before `end` of a sequence."""

    start: int
    end: int
    image: bytes


class ImageReader:
    """Makes the inputs of a vision-language model, whose files are at `path`; raises ValueError without them."""

    def __init__(self, path: Path, config: Any, rope_index: RopeIndex | None) -> None:
        self._token, self._rope_index = int(config.image_token_id), rope_index
        self._processor, self._config = load_processor(path), config
        self.read = lru_cache(_REMEMBERED)(self._read)

    def inputs(self, places: NDArray[np.int64], text_positions: NDArray[np.int64], batch: Batch) -> ImageInputs:
        """Return the images of the tokens at some `places` of a batch, -1 for padding."""
        ends = np.cumsum(batch.lengths, dtype=np.int64)
        here = places >= 0
        owners = np.where(here, np.searchsorted(ends, places, "right"), -1)
        sequences = np.unique(owners[here])
        kinds, rows = np.zeros(len(places), np.int64), np.full(len(places), -1)
        positions = np.tile(text_positions, (4, 1))
        order: dict[bytes, int] = {}  # first row of each image
        total = 0
        for sequence in sequences.tolist():
            start = int(ends[sequence] - batch.lengths[sequence])
            tokens = batch.tokens[start : int(ends[sequence])]
            runs = self.find_runs(tokens, () if batch.images is None else batch.images[sequence], sequence)
            mine = owners == sequence
            at = places[mine] - start
            row, kind = np.full(len(tokens), -1), np.zeros(len(tokens), np.int64)
            for run in runs:
                kind[run.start : run.end] = 1
                if not kind[at][(run.start <= at) & (at < run.end)].any():
                    continue  # on another rank
                if run.image not in order:
                    order[run.image] = total
                    total += run.end - run.start
                row[run.start : run.end] = order[run.image] + np.arange(run.end - run.start)
            rows[mine], kinds[mine] = row[at], kind[at]
            if self._rope_index is not None and runs:
                positions[1:, mine] = self._positions(tokens, kind, runs)[:, at]
        wanted = rows[here & (batch.tokens[places] == self._token)]
        pictures = [self.read(image) for image in order] or [self.read(draw(*_DUMMY))]
        arguments = {name: torch.cat([each.arguments[name] for each in pictures]) for name in pictures[0].arguments}
        return ImageInputs(arguments, wanted, None if self._rope_index is None else positions[:, None], kinds[None])

    def mark(self, batch: Batch) -> Batch:
        """Return a batch with marks at image tokens, another for each image."""
        if batch.images is None:
            return batch
        marks, numbers = np.zeros(len(batch.tokens), np.int32), dict[bytes, int]()
        starts = (np.cumsum(batch.lengths, dtype=np.int64) - batch.lengths).tolist()
        for sequence, (start, images) in enumerate(zip(starts, batch.images, strict=True)):
            own = batch.tokens[start : start + batch.lengths[sequence]]
            for run in self.find_runs(own, images, sequence) if images else ():
                marks[start + run.start : start + run.end] = numbers.setdefault(run.image, len(numbers) + 1)
        return batch.with_field(IMAGE_MARKS, marks)

    def find_runs(self, tokens: Ints, images: Images, sequence: int = 0) -> list[ImageRun]:
        """Return the image tokens of each image of a sequence. Raises ImageError where they do not fit each other."""
        found, left = list[ImageRun](), list(images)
        changes = np.flatnonzero(np.diff(np.concatenate(([False], tokens == self._token, [False]))))
        for start, end in changes.reshape(-1, 2).tolist():
            wanted = self._read_one(left[0], sequence, len(found)).tokens if left else 0
            if end - start == wanted:
                found.append(ImageRun(start, end, left.pop(0)))
            elif end - start > SAMPLED:
                known = f"its image {len(found)} takes {wanted}" if left else f"it has no image after {len(found)}"
                raise ImageError(
                    f"sequence {sequence} of the batch has {end - start} image tokens in a row (token {self._token}) "
                    f"from its token {start} on, but {known}. {_FIX}"
                )
        if left:
            raise ImageError(
                f"sequence {sequence} of the batch has {len(images)} images, but image tokens (token {self._token}) "
                f"for {len(found)} of them. {_FIX}"
            )
        return found

    def _read_one(self, image: bytes, sequence: int, number: int) -> ProcessedImage:
        try:
            return self.read(image)
        except ImageError as error:
            raise ImageError(f"sequence {sequence} of the batch, image {number}: {error}") from error

    def tokens(self, image: bytes) -> Ints:
        """Return the tokens of an image."""
        return np.full(self.read(image).tokens, self._token, np.int32)

    def _read(self, image: bytes) -> ProcessedImage:
        given = self._processor(images=[decode(image)], return_tensors="pt")
        arguments = {name: given[name] for name in ("pixel_values", "image_grid_thw") if name in given}
        return ProcessedImage(arguments, tokens_of(self._config, arguments.get("image_grid_thw")))

    def _positions(self, tokens: Ints, kinds: NDArray[np.int64], runs: Sequence[ImageRun]) -> NDArray[np.int64]:
        """Return a sequence's positions in time, height and width, `[3, tokens]`."""
        grids = torch.cat([self.read(run.image).arguments["image_grid_thw"] for run in runs])
        ids, types = torch.from_numpy(tokens).long()[None], torch.from_numpy(kinds).int()[None]
        assert self._rope_index is not None
        return self._rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)[0][:, 0].numpy()


_FIX = (
    "Every image takes as many tokens as the model's processor gives it: make prompts and observations with that "
    "processor, and return the images with their tokens"
)


def load_processor(path: Path) -> Any:
    """Return transformers' image processor of a model. Raises ValueError where its files are missing or wrong."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} has no image processor that transformers can load (preprocessor_config.json): {first}. Copy the "
            "file from the model's source"
        ) from error


def tokens_of(config: Any, grid: Tensor | None) -> int:
    """Return how many tokens an image takes, of so many patches in time, height and width if it is cut into patches."""
    if grid is None:
        return int(config.mm_tokens_per_image)
    return int(grid.prod()) // config.vision_config.spatial_merge_size**2
