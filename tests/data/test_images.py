"""Encoded images: their size without decoding, and errors that say what is wrong."""

from io import BytesIO

import pytest
from PIL import Image

from areal_like import images
from areal_like.images import ImageError, decode, image_token, read_size


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
