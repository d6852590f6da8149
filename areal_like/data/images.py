"""Images as they travel through a run: encoded, as PNG or JPEG, in the order in which they appear in the tokens.

The servers receive these bytes, and each trainer rank decodes its own sequences' images, so that both see one picture.
"""

import base64
import binascii
import struct
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 2**26  # of one image, 8192 x 8192: it takes 200 MB when it is decoded
MOST_BYTES = 2**25  # of one encoded image, 32 MiB
TOKEN_IDS = ("image_token_id", "image_token_index")  # fields of config.json: Qwen's and Gemma's

_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values that swap width and height
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"xmp")  # chunks of a PNG that Pillow reads the orientation from
_MOST_GREY = 2**16 - 1
_DAMAGED = (OSError, ValueError, SyntaxError, struct.error, KeyError, IndexError, TypeError)  # as Pillow raises them
_TOO_LARGE = (
    f"an image has more than {MOST_PIXELS:,} pixels, the most that is read. Make it smaller: models scale pictures down "
    "to fewer pixels anyway"
)
_AGAIN = "Save the image again, or leave it out"
_TOO_MANY_BYTES = f"an image has more than {MOST_BYTES:,} bytes, the most that is read. Save it smaller"


class ImageError(ValueError):
    """An image that cannot be used; the message has the problem and the remedy."""


def read_size(data: bytes) -> tuple[int, int]:
    """Return width and height of an encoded image as it is shown, without decoding it. Raises ImageError."""
    image = _open(data)
    if image.format == "PNG" and not any(mark in data for mark in _PNG_EXIF):
        return image.size  # without EXIF data; `getexif` would decode the picture to look for it at the end
    try:
        turned = image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
    except _DAMAGED as error:
        raise ImageError(f"the EXIF data of the {image.format} is damaged: {error}. {_AGAIN}") from error
    return (image.height, image.width) if turned else image.size


def decode(data: bytes) -> "Image":
    """Return the picture of an encoded image as it is shown, in RGB (`_flatten`). Raises ImageError if it is damaged.

    Datasets, agents' requests, servers and trainer ranks all decode images here.
    """
    image = _open(data)
    try:
        return _flatten(image)
    except _DAMAGED as error:
        raise ImageError(f"the {image.format} of {len(data)} bytes is damaged: {error}. {_AGAIN}") from error


def encode_picture(picture: "Image") -> bytes:
    """Return a decoded picture as PNG, in RGB (`_flatten`). Raises ImageError."""
    file = BytesIO()
    try:
        _flatten(picture).save(file, "PNG")
    except _DAMAGED as error:
        raise ImageError(f"a {type(picture).__name__} cannot be read: {error}. {_AGAIN}") from error
    return file.getvalue()


def _flatten(image: "Image") -> "Image":
    """Return a picture in RGB: rotated as its EXIF data say, transparency on a white ground, 16-bit greys scaled."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ImageError(f"a {type(image).__name__} has floating-point pixels. Convert it to 8 bits per channel")
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")


def _from_16_bits(image: "Image") -> "Image":
    """Return a picture of 16-bit greys with 8 bits; Pillow's own conversion cuts all values above 255."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > _MOST_GREY:
        raise ImageError(f"a {type(image).__name__} has greys beyond 16 bits. Convert it to 8 bits per channel")
    greys = np.rint(values * (255 / _MOST_GREY)).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        greys[values == transparent] = 255
    return Image.fromarray(greys)


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
