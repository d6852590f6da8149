"""Images as they travel through a run: encoded, as PNG or JPEG, in the order in which they appear in the tokens.

The servers receive these bytes, and each trainer rank decodes those of its own sequences, so that both see one picture.
"""

import base64
import binascii
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

type Images = tuple[bytes, ...]
"""The images of a sequence, encoded, in the order of their tokens."""

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 2**26  # of one image, 8192 x 8192: it takes 200 MB when it is decoded
MOST_BYTES = 2**25  # of one encoded image, 32 MiB
TOKEN_IDS = ("image_token_id", "image_token_index")  # fields of config.json: Qwen's and Gemma's


_TOO_LARGE = (
    f"an image has more than {MOST_PIXELS:,} pixels, the most that is read. Make it smaller: models scale pictures down "
    "to fewer pixels anyway"
)
_AGAIN = "Save the image again, or leave it out"
_TOO_MANY_BYTES = f"an image has more than {MOST_BYTES:,} bytes, the most that is read. Save it smaller"


class ImageError(ValueError):
    """An image that cannot be used; the message is what is wrong with it and what would do."""


def read_size(data: bytes) -> tuple[int, int]:
    """Return width and height of an encoded image, from its header alone. Raises ImageError."""
    return _open(data).size


def decode(data: bytes) -> "Image":
    """Return the picture of an encoded image in RGB, without transparency. Raises ImageError where it is damaged."""
    image = _open(data)
    try:
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"the {image.format} of {len(data)} bytes is damaged: {error}. {_AGAIN}") from error


def encode_picture(picture: "Image") -> bytes:
    """Return a decoded picture as PNG, which keeps its pixels. Raises ImageError."""
    file = BytesIO()
    try:
        picture.convert("RGB").save(file, "PNG")
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"a {type(picture).__name__} cannot be read: {error}. {_AGAIN}") from error
    return file.getvalue()


def as_data_url(image: bytes) -> str:
    """Return an image as the URL that OpenAI's messages have it in."""
    return f"data:{_media_type(image)};base64,{base64.b64encode(image).decode()}"


def from_data_url(url: str) -> bytes:
    """Return the image of a data URL. Raises ImageError for any other URL: nothing is fetched."""
    head, comma, content = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ImageError(
            f"{url[:60]!r} is not a data URL with base64. Send the image itself, as data:image/png;base64,..."
        )
    if len(content) > MOST_BYTES * 4 // 3 + 4:
        raise ImageError(_TOO_MANY_BYTES)
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:  # the latter where it is not ASCII
        raise ImageError(f"the data URL {url[:40]!r}... is not base64: {error}. Encode the image again") from error


def _media_type(image: bytes) -> str:
    starts = {b"\xff\xd8": "image/jpeg", b"RIFF": "image/webp"}
    return next((name for start, name in starts.items() if image.startswith(start)), "image/png")


def draw(width: int, height: int, *, seed: int = 0) -> bytes:
    """Return a made-up picture as PNG: coloured noise in blocks of 8 pixels."""
    import numpy as np
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    data = BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(data, "PNG")
    return data.getvalue()


def image_token(config: Mapping[str, object]) -> int | None:
    """Return the token that stands for a part of an image in a model's config.json; None for a model without images."""
    found = (config.get(name) for name in TOKEN_IDS if "vision_config" in config)
    return next((token for token in found if isinstance(token, int)), None)


def _open(data: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError

    if len(data) > MOST_BYTES:
        raise ImageError(_TOO_MANY_BYTES)
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(f"{len(data)} bytes are not an image. Save it as {' or '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise ImageError(_TOO_LARGE) from error
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"an image of {len(data)} bytes cannot be read: {error}. {_AGAIN}") from error
    if image.width * image.height > MOST_PIXELS:
        raise ImageError(_TOO_LARGE)
    return image
