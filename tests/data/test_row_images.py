"""Images in dataset rows: every form, and one error with row, field and fix for each that cannot be used."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from vision_models import picture, write_files

from areal_like.core.config.schema import TrainDatasetConfig
from areal_like.core.loop.prompt_results import prompt_keys
from areal_like.data.dataset import DatasetError, fingerprints, load_prompts
from areal_like.data.images import as_data_url
from areal_like.data.tokenizer import Tokenizer

ONE, TWO = picture(60, 40), picture(40, 90, 1, "JPEG")
QUESTION = "<image>What is in <image>?"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(str(write_files("qwen2_5_vl", tmp_path / "model")))


def load(tokenizer: Tokenizer, path: Path | str, **settings: Any) -> list[Any]:
    config = TrainDatasetConfig(path=str(path), max_prompt_length=500, **settings)
    return load_prompts(config, tokenizer, None)


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_paths_are_relative_to_the_file(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/1.png").write_bytes(ONE)
    (tmp_path / "2.jpg").write_bytes(TWO)
    file = jsonl(tmp_path, {"question": QUESTION, "images": ["pictures/1.png", str(tmp_path / "2.jpg")]})
    (prompt,) = load(tokenizer, file)
    assert prompt.images == (ONE, TWO) and prompt.row["images"] == [ONE, TWO]
    content = prompt.messages()[0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text", "image_url", "text"]
    assert prompt.tokens == tokenizer.encode_chat(prompt.messages())
    assert prompt.tokens.count(tokenizer.backend.token_to_id("<|image_pad|>")) == 2 + 3


def test_parquet_as_verl_writes_geo3k(tmp_path, tokenizer):
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": "geometry3k",
            "prompt": [{"role": "user", "content": "<image>Find x."}],
            "images": [{"bytes": ONE, "path": None}],
            "reward_model": {"style": "rule", "ground_truth": "3"},
        },
        {
            "data_source": "geometry3k",
            "prompt": [{"role": "user", "content": "Without a picture."}],
            "images": [],
            "reward_model": {"style": "rule", "ground_truth": "4"},
        },
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    settings = {"prompt_field": "prompt", "answer_field": "reward_model.ground_truth"}
    first, second = load(tokenizer, tmp_path / "rows.parquet", **settings)
    assert first.images == (ONE,) and first.answer == "3" and second.images == ()
    assert first.messages()[0]["content"][1] == {"type": "text", "text": "Find x."}


def pil_rows() -> list[dict[str, Any]]:
    from PIL import Image

    decoded = Image.open(BytesIO(TWO))
    return [
        {"question": "<image>", "images": decoded},
        {"question": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "images": ONE},
        {"question": "What is it?", "images": [ONE, bytearray(TWO), as_data_url(ONE)]},
        {"question": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": as_data_url(TWO)}}]}]},
    ]


def test_pictures_bytes_and_messages(tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    first, second, third, fourth = load(tokenizer, f"{__file__}:pil_rows")
    assert first.images[0].startswith(b"\x89PNG") and second.images == (ONE,)
    assert third.images == (ONE, TWO, ONE)  # without places they come first
    assert [part["type"] for part in third.messages()[0]["content"]] == ["image_url"] * 3 + ["text"]
    assert fourth.images == (TWO,)


def huge() -> bytes:
    """Return a PNG whose header says 20,000 x 20,000 pixels, in a few bytes."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


BAD: dict[str, tuple[str, Any, str]] = {
    "missing file": ("<image>", ["none.png"], "image.* none.png cannot be read"),
    "truncated": ("<image>", ["cut.png"], "image 1: the PNG of .* is damaged"),
    "truncated JPEG": ("<image>", ["cut.jpg"], "image 1: an image of .* cannot be read"),
    "too large": ("<image>", ["huge.png"], "more than 67,108,864 pixels"),
    "no image": ("<image>", ["rows.jsonl"], "are not an image"),
    "a long line": ("<image>", ["line.png"], "1000 x 4 pixels is more than 200 times"),
    "none": ("<image>", [], "names 1 images and it has 0.*add the missing images"),
    "null": ("<image>", None, "names 1 images and it has 0"),
    "too many": ("<image>", ["one.png", "one.png"], "names 1 images and it has 2.*write one <image>"),
    "too few": ("<image><image>", ["one.png"], "names 2 images and it has 1"),
    "a number": ("<image>", [3], "type int is not an image"),
    "remote": ("<image>", ["https://example.org/1.png"], "would have to be downloaded.*download it first"),
    "the token": ("<|image_pad|>", [], "has the token <.image_pad.> and no image"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_unusable_image_is_one_error_with_row_field_and_fix(tmp_path, tokenizer, name):
    text, images, words = BAD[name]
    for file, data in {
        "one.png": ONE,
        "cut.png": ONE[: len(ONE) // 2],
        "cut.jpg": TWO[: len(TWO) // 2],
        "huge.png": huge(),
        "line.png": picture(1000, 4),
    }.items():
        (tmp_path / file).write_bytes(data)
    file = jsonl(tmp_path, {"question": "<image>", "images": ["one.png"]}, {"question": text, "images": images})
    with pytest.raises(DatasetError, match=rf"(?s)rows.jsonl, row 2 .*{words}") as raised:
        load(tokenizer, file)
    assert (raised.value.code, raised.value.field) == ("RUN-DATASET-IMAGES", "image_field")
    assert raised.value.remedy


def test_a_model_of_text_refuses_images_and_ignores_an_empty_column(tmp_path):
    (tmp_path / "one.png").write_bytes(ONE)
    text = Tokenizer.make("bytes")
    with pytest.raises(DatasetError, match="model takes text only") as raised:
        load(text, jsonl(tmp_path, {"question": "<image>", "images": ["one.png"]}))
    assert raised.value.code == "RUN-DATASET-IMAGES"
    assert len(load(text, jsonl(tmp_path, {"question": "<image>", "images": ["one.png"]}), image_field=None)) == 1
    assert len(load(text, jsonl(tmp_path, {"question": "<image>", "images": []}))) == 1


def test_the_same_text_about_another_image_is_another_prompt(tmp_path, tokenizer):
    for name, image in {"a.png": ONE, "b.png": picture(60, 40, 7)}.items():
        (tmp_path / name).write_bytes(image)
    rows = [{"question": "<image>?", "images": [name]} for name in ("a.png", "b.png", "a.png")]
    prompts = load(tokenizer, jsonl(tmp_path, *rows))
    assert prompts[0].tokens == prompts[1].tokens
    assert prompt_keys(prompts, None).tolist() == [0, 1, 0]
    assert fingerprints(prompts[:1]) != fingerprints(prompts[1:2])


def test_a_long_prompt_with_images_is_not_cut(tmp_path, tokenizer):
    (tmp_path / "one.png").write_bytes(ONE)
    file = jsonl(tmp_path, {"question": "<image>" + "x" * 600, "images": ["one.png"]})
    with pytest.raises(DatasetError, match=r"has 6.. tokens"):
        load(tokenizer, file, overlong_prompts="truncate")
