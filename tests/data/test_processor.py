"""The tokens of images: those of transformers' processor, from its files alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from io import BytesIO
from typing import Any

import pytest
from vision_models import FAMILIES, picture, write_files

from areal_like.data.images import as_data_url
from areal_like.data.tokenizer import Tokenizer, TokenizerError

SIZES = (5, 28, 41, 60, 112, 333, 700)


def conversation(images: list[bytes], texts: list[str]) -> list[dict[str, Any]]:
    """Return a message with images, each before a text."""
    parts: list[dict[str, Any]] = []
    for image, text in zip(images, texts, strict=True):
        parts += [{"type": "image_url", "image_url": {"url": as_data_url(image)}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_transformers_processor(tmp_path, family):
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(write_files(family, tmp_path))
    tokenizer = Tokenizer.load(str(tmp_path))
    chosen = random.Random(0)
    for seed in range(25):
        count = chosen.randint(1, 3)
        images = [picture(chosen.choice(SIZES), chosen.choice(SIZES), seed, "PNG") for _ in range(count)]
        texts = [chosen.choice(["\n", "\n\n", " what is <b>this</b>?", "Größe"]) for _ in images]
        messages = conversation(images, texts)
        plain = [{"type": "image"} if part["type"] == "image_url" else part for part in messages[0]["content"]]
        text = processor.apply_chat_template([{"role": "user", "content": plain}], add_generation_prompt=True)
        decoded = [Image.open(BytesIO(image)).convert("RGB") for image in images]
        expected = processor(text=[text], images=[decoded])["input_ids"][0]
        assert tokenizer.encode_chat(messages) == list(expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "has no preprocessor_config.json or processor_config.json"),
        ({"do_resize": False}, "do_resize=False"),
        ({"patch_size": 8}, "patch_size=8"),
        ({"min_pixels": 10**6}, "impossible sizes"),
        ("{", "cannot be read"),
    ],
)
def test_a_processor_that_cannot_be_used_is_named(tmp_path, change, words):
    write_files("qwen2_5_vl", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(TokenizerError, match=words.replace("(", r"\(")):
        Tokenizer.load(str(tmp_path))


def test_a_gemma3_whose_files_disagree_is_refused(tmp_path):
    write_files("gemma3", tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_seq_length": 256}')
    with pytest.raises(TokenizerError, match="image_seq_length=256; write the same number"):
        Tokenizer.load(str(tmp_path))


def test_more_placeholders_than_images_are_refused(tmp_path):
    tokenizer = Tokenizer.load(str(write_files("qwen3_vl", tmp_path)))
    messages = conversation([picture(32, 32)], ["<|image_pad|>"])
    with pytest.raises(TokenizerError, match=r"2 places for images .* and 1 images"):
        tokenizer.encode_chat(messages)


def test_an_image_for_a_model_of_text_is_refused():
    with pytest.raises(TokenizerError, match="text only"):
        Tokenizer.make("bytes").encode_chat(conversation([picture(32, 32)], ["?"]))


def test_neither_torch_nor_transformers_is_imported():
    code = "import areal_like.data.processor, areal_like.data.row_images, sys; print({'torch', 'transformers'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
