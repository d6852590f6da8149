"""Data in one or several files: folders, patterns, lists and kinds of files, and what is said about bad ones."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError
from vision_models import picture, write_files

from areal_like.config.schema import DatasetConfig, ValidDatasetConfig
from areal_like.data.dataset import load_prompts
from areal_like.data.rows import DatasetError
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards.verifiers import REWARDS

BYTES = Tokenizer.make("bytes")


def lines(*questions: str) -> bytes:
    return "".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions).encode()


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def table(*questions: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist([{"question": text, "answer": "1"} for text in questions]), sink)
    return sink.getvalue().to_pybytes()


def questions(path: Any, config: type[DatasetConfig] = DatasetConfig, **keys: Any) -> list[str]:
    return [BYTES.decode(prompt.tokens) for prompt in load_prompts(config(path=path, **keys), BYTES, None)]


KINDS = {
    "a.jsonl": lines("1", "2"),
    "a.json": json.dumps([{"question": "1"}, {"question": "2"}], indent=2).encode(),
    "lines.json": lines("1", "2"),
    "one.json": b'{"question": "1"}',
    "bom.jsonl": b"\xef\xbb\xbf" + lines("1", "2"),
    "a.jsonl.gz": gzip.compress(lines("1", "2")),
    "a.json.gz": gzip.compress(b'[{"question": "1"}, {"question": "2"}]'),
    "a.parquet": table("1", "2"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_files(tmp_path, name):
    put(tmp_path, {name: KINDS[name]})
    assert questions(str(tmp_path / name)) == ["1", "2"][: 1 if name == "one.json" else 2]


def test_a_folder_a_pattern_and_a_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"b-2.jsonl": lines("3"), "b-1.jsonl": lines("1", "2"), "deep/c.jsonl.gz": gzip.compress(lines("4"))}
    others = {"README.md": b"#", ".hidden/x.jsonl": lines("9"), "dataset_infos.json": b"{}", "deep/picture.png": b"x"}
    put(tmp_path / "data", files | others)
    assert questions("data") == ["1", "2", "3", "4"]
    assert questions("data/*.jsonl") == ["1", "2", "3"]
    assert questions("data/**/*.jsonl*") == ["1", "2", "3", "4"]
    assert questions("data/b-[2].jsonl") == ["3"]
    assert questions(["data/b-2.jsonl", "data/b-1.jsonl"]) == ["3", "1", "2"]
    assert questions(["data/deep", "data/b-*.jsonl"]) == ["4", "1", "2", "3"]
    put(tmp_path, {"odd[1].jsonl": lines("5")})
    assert questions("odd[1].jsonl") == ["5"]


def test_a_folder_with_several_splits_has_the_rows_of_one(tmp_path):
    put(
        tmp_path / "by_name",
        {
            "data/train-00001-of-00002.parquet": table("2"),
            "data/train-00000-of-00002.parquet": table("1"),
            "data/test-00000-of-00001.parquet": table("3"),
        },
    )
    put(
        tmp_path / "by_folder",
        {"train/0.jsonl": lines("1", "2"), "val/0.jsonl": lines("4"), "test/0.jsonl": lines("3")},
    )
    for folder in ("by_name", "by_folder"):
        path = str(tmp_path / folder)
        assert questions(path) == ["1", "2"] and questions(path, ValidDatasetConfig) == ["3"]
    assert questions(str(tmp_path / "by_folder"), split="validation") == ["4"]
    with pytest.raises(DatasetError, match="files of the splits test, train, and none of validation") as caught:
        questions(str(tmp_path / "by_name"), split="validation")
    assert (caught.value.field, caught.value.code) == ("split", "RUN-DATASET-FILE")


@pytest.mark.parametrize(
    ("files", "path", "words"),
    [
        ({"a.txt": b"x"}, "", "folder without JSONL, JSON or Parquet files"),
        ({"a.jsonl": lines("1")}, "*.parquet", "matches no file"),
        ({"a.jsonl": lines("1"), "a.txt": b"x"}, "a.*", r"a\.txt is not a JSONL, JSON or Parquet file"),
        ({"a.jsonl": lines("1"), "b.parquet": table("2")}, "", "files of JSON and of Parquet"),
        ({"train.jsonl": lines("1"), "more.jsonl": lines("2")}, "", r"more\.jsonl is of none of them"),
        ({"data-00000-of-00001.arrow": b"", "state.json": b"{}"}, "", "save_to_disk"),
        ({"a.jsonl": lines("1")}, ["a.jsonl", "b.jsonl"], r"b\.jsonl does not exist"),
        ({"a.jsonl": lines("1")}, ["a.jsonl", "owner/name"], "owner/name does not exist"),
        ({"folder.jsonl/a.txt": b"x"}, "folder.jsonl", "folder without"),
    ],
)
def test_files_that_cannot_be_found_are_named(tmp_path, files, path, words):
    put(tmp_path, files)
    paths = [str(tmp_path / each) for each in path] if isinstance(path, list) else str(tmp_path / path)
    with pytest.raises(DatasetError, match=words) as caught:
        questions(paths)
    assert caught.value.code == "RUN-DATASET-FILE" and caught.value.remedy


def test_a_list_has_a_file(tmp_path):
    with pytest.raises(ValidationError):
        DatasetConfig(path=[])


def test_a_row_is_named_with_its_own_file_and_images_are_beside_it(tmp_path):
    put(tmp_path, {"1.jsonl": lines("1", "2"), "2.jsonl": lines("3", " ")})
    with pytest.raises(DatasetError, match=r"2\.jsonl, row 2 has nothing"):
        questions([str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl")])
    tokenizer = Tokenizer.load(str(write_files("qwen2_5_vl", tmp_path / "model")))
    row = json.dumps({"question": "<image>", "images": ["1.png"]}).encode()
    put(
        tmp_path / "images",
        {"a/1.png": picture(60, 40), "a/x.jsonl": row, "b/1.png": picture(40, 60), "b/x.jsonl": row},
    )
    first, second = load_prompts(DatasetConfig(path=str(tmp_path / "images")), tokenizer, None)
    assert first.images == (picture(60, 40),) and second.images == (picture(40, 60),)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", lines("1").decode().encode("utf-16"), "UTF-16 text"),
        ("a.json", '[{"question": "1"}]'.encode("utf-16-be"), "UTF-16-BE text"),
        ("a.jsonl.gz", gzip.compress(lines("1").decode().encode("utf-32"), mtime=0), "UTF-32 text"),
        ("a.jsonl", lines("1") + '{"question": "é"}'.encode("latin-1"), "line 2 is not UTF-8"),
        ("a.jsonl", b'[{"question": "1"}]', "line 1 is not an object.*name a list of objects .json"),
        ("a.json", b'[{"question": "1"},]', "is not JSON"),
        ("a.json", b'[{"question": "1"}, 5]', "row 2 is not an object"),
        ("a.json", b"5", "row 1 is not an object"),
        ("a.jsonl.gz", lines("1"), "not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(lines(*"123456789"), mtime=0)[:-9], "not a whole gzip file"),
    ],
)
def test_text_that_is_not_json_in_utf_8_is_named(tmp_path, name, data, words):
    put(tmp_path, {name: data})
    with pytest.raises(DatasetError, match=f"(?s){words}") as caught:
        questions(str(tmp_path / name))
    assert caught.value.code == "RUN-DATASET-FILE" and caught.value.remedy


def test_a_binary_column_is_named(tmp_path):
    parquet.write_table(pyarrow.table({"question": [b"1 + 1?"], "answer": [b"2"]}), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"bytes \(a binary column\).*field 'question'.*as text"):
        questions(str(tmp_path / "a.parquet"))
    parquet.write_table(pyarrow.table({"question": ["1 + 1?"], "answer": [b"2"]}), tmp_path / "b.parquet")
    with pytest.raises(DatasetError, match=r"neither text nor a number \(bytes\) in field 'answer'"):
        load_prompts(DatasetConfig(path=str(tmp_path / "b.parquet")), BYTES, REWARDS["gsm8k"].check)


@pytest.mark.parametrize(("number", "wanted"), [("4", "4"), ("2.50", "2.50"), ("1E+2", "100"), ("-0.001", "-0.001")])
def test_a_decimal_is_a_number(tmp_path, number, wanted):
    rows = pyarrow.Table.from_pylist([{"question": "?", "answer": Decimal(number)}])
    parquet.write_table(rows, tmp_path / "a.parquet")
    config = DatasetConfig(path=str(tmp_path / "a.parquet"))
    assert [prompt.answer for prompt in load_prompts(config, BYTES, REWARDS["gsm8k"].check)] == [wanted]
