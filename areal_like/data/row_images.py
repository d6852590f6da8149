"""The images of dataset rows, and their places in a row's messages."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from areal_like.core.types import Images
from areal_like.data.images import ImageError, as_data_url, decode, encode_picture, from_data_url

PLACE = "<image>"  # in a text, as in verl and other systems
_NO_PLACE = "Write one <image> into the text for each image, or none: then the images come before the text"

type Message = Mapping[str, Any]


def read_images(value: Any, folder: Path) -> Images:
    """Return the encoded images of a column: one, or a list of them. Raises ImageError.

    An image is a path, which may be relative to `folder`, a data URL, encoded bytes, a PIL image, or an object with
    `bytes` or `path`, as Parquet files of the datasets library have it. All of them are decoded once, as a check.
    """
    if value is None:
        return ()
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    images = tuple(_read_image(each, folder) for each in (value if several else [value]))
    for place, image in enumerate(images, 1):
        try:
            decode(image)
        except ImageError as error:
            raise ImageError(f"image {place}: {error}") from error
    return images


def _read_image(value: Any, folder: Path) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str) and value.startswith("data:"):
        return from_data_url(value)
    if isinstance(value, str) and re.match(r"https?://", value):
        raise ImageError(f"{value[:80]} would have to be downloaded. Download it first, and name the file")
    if isinstance(value, str) and value:
        try:
            return Path(os.path.expanduser(value) if value.startswith("~") else folder / value).read_bytes()
        except (OSError, ValueError) as error:  # the latter if the name has a zero byte
            reason = getattr(error, "strerror", None) or str(error)
            raise ImageError(f"{value[:200]} cannot be read from {folder}: {reason}. Correct the path") from error
    if hasattr(value, "convert") and hasattr(value, "save"):
        return encode_picture(value)
    raise ImageError(
        f"a value of type {type(value).__name__} is not an image. Write a path, encoded bytes, or an object with "
        "`bytes` or `path`"
    )


def count_places(messages: Sequence[Message]) -> int:
    """Return the number of image placeholders in messages."""
    pieces = chain.from_iterable(map(_pieces, messages))
    return sum(piece["type"] == "image" for piece in pieces)


def with_images(messages: Sequence[Message], images: Images) -> list[dict[str, Any]]:
    """Return messages with images at their placeholders, or else at the start of the user's text, in OpenAI's format.

    Raises ImageError if the numbers differ.
    """
    places = count_places(messages)
    if not places and images:
        return _with_images_first(messages, images)
    if places != len(images):
        fix = _NO_PLACE if len(images) > places else "Add the missing images, or leave the row out"
        raise ImageError(f"its text names {places} images and it has {len(images)}. {fix}")
    left = list(map(_part, images))
    return [_fill(message, left) for message in messages]


def _fill(message: Message, left: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message with its placeholders filled with the first parts of `left`."""
    pieces = _pieces(message)
    if not any(piece["type"] == "image" for piece in pieces):
        return dict(message)
    return {**message, "content": [left.pop(0) if piece["type"] == "image" else piece for piece in pieces]}


def _with_images_first(messages: Sequence[Message], images: Images) -> list[dict[str, Any]]:
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ImageError(f"it has {len(images)} images and no message of the user. Add one")
    content = [*map(_part, images), *_pieces(messages[first])]
    return [{**message, "content": content} if at == first else dict(message) for at, message in enumerate(messages)]


def _part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_data_url(image)}}


def _pieces(message: Message) -> list[dict[str, Any]]:
    """Return a message's content in parts, with a part `image` for each place."""
    content = message.get("content")
    if content is None:
        return []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]
    found: list[dict[str, Any]] = []
    for part in parts:
        if part.get("type") != "text":
            found.append({"type": part.get("type")} if part.get("type") == "image" else part)
            continue
        for piece in re.split(f"({re.escape(PLACE)})", part["text"]):
            if piece:
                found.append({"type": "image"} if piece == PLACE else {"type": "text", "text": piece})
    return found
