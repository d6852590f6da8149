"""How many tokens an image takes and where they are in a prompt, from the files of a model's processor alone.

The ids equal the ones of transformers' processor, which needs torch and takes a second to import; a test compares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.core.types import Images
from areal_like.data.images import ImageError, from_data_url, read_size

# The number of tokens depends on the image's size
GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FIXED = ("gemma3",)  # every image takes the same number of tokens
SEES_WHOLE_IMAGES = frozenset({"gemma3"})  # image tokens attend to all tokens of their image, also later ones
MOST_ASPECT = 200  # of height to width; transformers rejects more
_PATCH, _MERGE, _LEAST, _MOST = 14, 2, 56 * 56, 28 * 28 * 1280  # transformers' defaults
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ProcessorError(Exception):
    """The files of an image processor are missing or unusable; the message names them and the fix."""


@dataclass(frozen=True)
class ImageGrid:
    """The tokens of an image that is scaled to a number of pixels and cut into patches; sizes are in pixels."""

    patch: int = _PATCH
    merge: int = _MERGE
    least: int = _LEAST
    most: int = _MOST

    def tokens(self, image: bytes) -> int:
        """Return how many tokens an image takes. Raises ImageError."""
        height, width = self.scale_size(*read_size(image)[::-1])
        return (height // self.patch) * (width // self.patch) // self.merge**2

    def scale_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that an image is scaled to, a multiple of merged patches (`smart_resize` of transformers)."""
        if max(height, width) > MOST_ASPECT * min(height, width):
            raise ImageError(
                f"an image of {width} x {height} pixels is more than {MOST_ASPECT} times as long as wide. Cut it"
            )
        unit = self.patch * self.merge
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rows * columns > self.most:
            shrink = math.sqrt(height * width / self.most)
            rows = max(unit, math.floor(height / shrink / unit) * unit)
            columns = max(unit, math.floor(width / shrink / unit) * unit)
        elif rows * columns < self.least:
            grow = math.sqrt(self.least / (height * width))
            rows, columns = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return rows, columns


@dataclass(frozen=True)
class Fixed:
    """The tokens of an image that is scaled to one size."""

    count: int

    def tokens(self, image: bytes) -> int:
        """Return how many tokens an image takes. Raises ImageError."""
        read_size(image)
        return self.count


@dataclass(frozen=True)
class VisionProcessor:
    """The images of prompts of one model.

    A chat template writes `mark` for an image, with one `placeholder`. In the prompt it is replaced by `before`, an
    image token for each part of the image, and `after`.
    """

    sizes: ImageGrid | Fixed
    mark: str
    placeholder: str
    token: str
    before: str = ""
    after: str = ""

    def expand(self, text: str, images: Images) -> str:
        """Return a text with each image's placeholder replaced by its tokens. Raises ImageError."""
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(images):
            raise ImageError(
                f"the prompt has {len(parts) - 1} places for images ({self.placeholder}) and {len(images)} images. "
                "Write one place for each image, and the placeholder nowhere else"
            )
        filled = [f"{self.before}{self.token * self.sizes.tokens(image)}{self.after}" for image in images]
        return "".join(piece for pair in zip(parts, [*filled, ""], strict=True) for piece in pair)


def load_processor(directory: Path, special_tokens: Mapping[str, str]) -> VisionProcessor | None:
    """Read the processor of a vision-language model; None for other models. Raises ProcessorError.

    `special_tokens` come from the tokenizer's settings, such as `image_token`.
    """
    model = _read(directory / "config.json")
    family = model.get("model_type")
    if "vision_config" not in model or family not in (*GRID, *FIXED):
        return None
    own = _read(directory / "processor_config.json")
    settings = _read(directory / "preprocessor_config.json") or own.get("image_processor", {})
    if not settings:
        raise ProcessorError(
            f"{directory} has no {' or '.join(PROCESSOR_FILES)}: copy the image processor's file from the model's source"
        )
    if settings.get("do_resize") is False or settings.get("do_pan_and_scan"):
        name = "do_pan_and_scan" if settings.get("do_pan_and_scan") else "do_resize"
        raise ProcessorError(f"{directory} has an image processor with {name}={settings[name]}, which is not supported")
    if family in FIXED:
        count = own.get("image_seq_length", 256)
        if count != model.get("mm_tokens_per_image", 256):
            raise ProcessorError(
                f"{directory}: config.json has mm_tokens_per_image={model.get('mm_tokens_per_image', 256)} and the "
                f"processor image_seq_length={count}; write the same number"
            )
        first = special_tokens.get("boi_token", "<start_of_image>")
        last = special_tokens.get("eoi_token", "<end_of_image>")
        token = special_tokens.get("image_token", "<image_soft_token>")
        return VisionProcessor(Fixed(count), first, first, token, f"\n\n{first}", f"{last}\n\n")
    return grid_processor(settings, model["vision_config"], str(directory), special_tokens)


def grid_processor(
    settings: Mapping[str, Any], vision: Mapping[str, Any], source: str, special_tokens: Mapping[str, str]
) -> VisionProcessor:
    """Return the processor of a Qwen-VL from the settings of its image processor. Raises ProcessorError.

    `vision` is the tower's configuration, `source` names the model in errors.
    """
    token = special_tokens.get("image_token", "<|image_pad|>")
    mark = f"<|vision_start|>{token}<|vision_end|>"
    return VisionProcessor(_grid(settings, vision, source), mark, token, token)


def _grid(settings: Mapping[str, Any], vision: Mapping[str, Any], directory: str) -> ImageGrid:
    """Read the sizes of an image processor; min_pixels and max_pixels come before `size`, as in transformers."""
    size = settings.get("size") or {}
    least, most = (
        settings.get(old) or size.get(new, default)
        for old, new, default in (("min_pixels", "shortest_edge", _LEAST), ("max_pixels", "longest_edge", _MOST))
    )
    grid = ImageGrid(settings.get("patch_size", _PATCH), settings.get("merge_size", _MERGE), least, most)
    wanted = vision.get("patch_size", grid.patch), vision.get("spatial_merge_size", grid.merge)
    if (grid.patch, grid.merge) != wanted:
        raise ProcessorError(
            f"{directory}: the image processor has patch_size={grid.patch} and merge_size={grid.merge}, the model "
            f"{wanted[0]} and {wanted[1]}. Copy the processor's file from the model's source"
        )
    sizes = (grid.patch, grid.merge, grid.least, grid.most)
    if not all(isinstance(value, int) and value > 0 for value in sizes) or grid.least > grid.most:
        raise ProcessorError(f"{directory} has an image processor with impossible sizes: {sizes}")
    return grid


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProcessorError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ProcessorError(f"{file} is not a JSON object")
    return content


def images_of(messages: Sequence[Mapping[str, Any]]) -> Images:
    """Return the images of messages, in order, from their parts `image_url`. Raises ImageError."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return tuple(from_data_url(url_of(part)) for part in parts if part.get("type") == "image_url")


def url_of(part: Mapping[str, Any]) -> str:
    """Return the URL of a part `image_url`; "" where it has none. OpenAI has it in an object, other servers as text."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) else ""


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages as the chat templates of all families take them: with parts `image`, without the images."""

    def part_of(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "image"} if part.get("type") == "image_url" else part

    return [
        {**message, "content": [part_of(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
