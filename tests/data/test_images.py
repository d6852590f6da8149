"""Encoded images: their size without decoding, and errors that say what is wrong."""

import struct
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from areal_like.data import images
from areal_like.data.images import ImageError, decode, encode_picture, image_token, read_size


def encoded(width, height, form="PNG"):
    data = BytesIO()
    Image.radial_gradient("L").resize((width, height)).convert("RGB").save(data, form)
    return data.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_size_and_picture_of_an_image(form):
    data = encoded(31, 17, form)
    assert read_size(data) == (31, 17)
    assert (decode(data).size, decode(data).mode) == ((31, 17), "RGB")


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_truncated_image_is_found_when_it_is_decoded(form):
    data = encoded(300, 200, form)
    with pytest.raises(ImageError, match="damaged"):
        decode(data[: len(data) // 2])


def test_what_is_not_an_image_and_what_is_too_large(monkeypatch):
    for data in (b"", b"GIF89a", b"not an image", encoded(8, 8, "BMP"), encoded(9, 9)[:20]):
        with pytest.raises(ImageError, match="bytes"):
            read_size(data)
    monkeypatch.setattr(images, "MOST_PIXELS", 100)
    with pytest.raises(ImageError, match="Make it smaller"):
        read_size(encoded(20, 10))


def test_a_picture_of_20000_by_20000_is_refused_before_it_is_decoded():
    data = BytesIO()
    Image.new("1", (20_000, 20_000)).save(data, "PNG")
    with pytest.raises(ImageError, match="more than 67,108,864 pixels"):
        decode(data.getvalue())


@pytest.mark.parametrize(
    ("config", "token"),
    [
        ({"vision_config": {}, "image_token_id": 5}, 5),
        ({"vision_config": {}, "image_token_index": 7}, 7),
        ({"image_token_id": 5}, None),
        ({"vision_config": {}}, None),
    ],
)
def test_the_image_token_of_a_model(config, token):
    assert image_token(config) == token


def saved(image, form="PNG", **settings):
    data = BytesIO()
    image.save(data, form, **settings)
    return data.getvalue()


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, colour, pixels, *chunks):
    """Return a PNG by hand: Pillow does not write every form that it reads."""
    size = len(pixels) // height
    lines = b"".join(b"\0" + pixels[row * size : (row + 1) * size] for row in range(height))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *chunks]
    parts += [(b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def half_red(mode):
    """Return a picture whose left half is transparent black and whose right half is red, or black without colours."""
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (2, 0, 4, 2))
    return image.convert(mode)


PALETTE = png(2, 1, 8, 3, b"\0\1", (b"PLTE", bytes([0, 0, 0, 255, 0, 0])), (b"tRNS", b"\0"))
WHITE, RED = (255, 255, 255), (255, 0, 0)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (saved(half_red("RGBA")), (WHITE, RED)),
        (saved(half_red("RGBA"), "WEBP", lossless=True), (WHITE, RED)),
        (saved(half_red("LA")), (WHITE, (76, 76, 76))),
        (PALETTE, (WHITE, RED)),
        (png(2, 1, 8, 2, b"\0\0\0\xff\0\0", (b"tRNS", bytes(6))), (WHITE, RED)),
        (png(2, 1, 8, 0, b"\0\x10", (b"tRNS", b"\0\0")), (WHITE, (16, 16, 16))),
        (png(2, 1, 1, 0, b"\x40", (b"tRNS", b"\0\0")), (WHITE, WHITE)),
        (png(2, 1, 16, 0, b"\0\0\x80\x80", (b"tRNS", b"\0\0")), (WHITE, (128, 128, 128))),
        (png(2, 1, 16, 4, b"\0\0\0\0\x80\x80\xff\xff"), (WHITE, (128, 128, 128))),
        (png(2, 1, 16, 6, bytes(8) + b"\xff\xff\0\0\0\0\xff\xff"), (WHITE, RED)),
        (saved(Image.new("RGBA", (4, 2), (255, 0, 0, 51))), ((255, 204, 204), (255, 204, 204))),
    ],
)
def test_transparency_is_shown_on_a_white_ground(data, wanted):
    image = decode(data)
    assert (image.mode, image.getpixel((0, 0)), image.getpixel((image.width - 1, 0))) == ("RGB", *wanted)
    assert decode(encode_picture(Image.open(BytesIO(data)))).tobytes() == image.tobytes()


def test_greys_of_16_bits_are_scaled():
    values = np.array([[0, 128, 257 * 17, 32896, 65535]], np.uint16)
    for picture in (Image.fromarray(values), Image.fromarray(values.astype(np.int32))):
        greys = np.asarray(decode(encode_picture(picture)))[0, :, 0]
        assert greys.tolist() == [0, 0, 17, 128, 255]
    assert np.asarray(decode(saved(Image.fromarray(values))))[0, :, 0].tolist() == greys.tolist()


@pytest.mark.parametrize(
    "picture", [Image.new("F", (2, 2)), Image.new("I", (2, 2), 70_000), Image.new("I", (2, 2), -1)]
)
def test_a_picture_without_a_known_range_is_refused(picture):
    with pytest.raises(ImageError, match="8 bits per channel"):
        encode_picture(picture)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_rotated_as_its_exif_data_say(form, orientation):
    plain = Image.new("RGB", (16, 8), "white")
    plain.paste("red", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(plain, form, exif=exif)
    image = decode(data)
    assert read_size(data) == image.size == ((8, 16) if orientation > 4 else (16, 8))
    right, below = orientation in (2, 3, 7, 8), orientation in (3, 4, 6, 7)
    right, below = (orientation in (6, 7), orientation in (7, 8)) if orientation > 4 else (right, below)
    red, green, blue = image.getpixel((image.width - 2 if right else 1, image.height - 2 if below else 1))
    assert red > 200 and max(green, blue) < 80
    assert decode(encode_picture(Image.open(BytesIO(data)))).size == image.size


def test_a_png_with_its_exif_data_at_the_end_has_one_size():
    data = saved(Image.new("RGB", (16, 8)))
    exif = Image.Exif()
    exif[0x0112] = 6
    late = data[:-12] + png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + data[-12:]
    assert read_size(late) == decode(late).size == (8, 16)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's own
def test_damaged_exif_data_are_one_error():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.new("RGB", (16, 8)), "JPEG", exif=exif)
    for at in range(20, 60):
        broken = data[:at] + b"\xff" + data[at + 1 :]
        with suppress(ImageError):
            assert read_size(broken) == decode(broken).size
