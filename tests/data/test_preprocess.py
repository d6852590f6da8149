import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.core.config.schema import DatasetConfig
from areal_like.data.records import read_records

ROOT = Path(__file__).parents[2]


def run(script, *arguments):
    command = [sys.executable, str(ROOT / "examples/data_preprocess" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False)


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(file):
    return list(read_records(DatasetConfig(path=str(file))).rows)


def test_gsm8k(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}] * 2)
    write(tmp_path / "test.jsonl", [{"question": "1 + 2?", "answer": "#### 3"}])
    done = run("gsm8k.py", "--input", tmp_path, "--output-dir", tmp_path / "out", "--instruction", "Think.")
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "out/train.parquet") == [{"question": "1 + 1? Think.", "answer": "It is 2.\n#### 2"}] * 2
    assert read(tmp_path / "out/test.parquet") == [{"question": "1 + 2? Think.", "answer": "#### 3"}]


def test_one_file_is_not_taken_for_both_splits(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    done = run("gsm8k.py", "--input", tmp_path / "train.jsonl", "--output-dir", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr == f"error: {tmp_path / 'train.jsonl'} is one file; name the directory of train and test\n"


def test_gsm8k_writes_nothing_when_a_row_is_wrong(tmp_path):
    write(tmp_path / "train.jsonl", [{"question": "1 + 1?", "answer": "2"}])
    write(tmp_path / "test.jsonl", [{"question": "1 + 2?", "answer": "#### 3"}])
    done = run("gsm8k.py", "--input", tmp_path, "--output-dir", tmp_path / "out")
    assert done.returncode == 2 and "row 1" in done.stderr and not (tmp_path / "out").exists()


def test_deepscaler(tmp_path):
    rows = [{"problem": f"p{n}", "answer": "\\frac{1}{2}", "solution": "..."} for n in range(10)]
    write(tmp_path / "all.jsonl", rows)
    done = run("deepscaler.py", "--input", tmp_path / "all.jsonl", "--output-dir", tmp_path, "--test-size", 3)
    assert done.returncode == 0, done.stderr
    train, test = read(tmp_path / "train.parquet"), read(tmp_path / "test.parquet")
    assert (len(train), len(test)) == (7, 3)
    assert len({row["question"] for row in train + test}) == 10
    assert {row["answer"] for row in train + test} == {"#### \\frac{1}{2}"}


SCRIPTS = pytest.mark.parametrize("script", ["gsm8k.py", "deepscaler.py"])


@SCRIPTS
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_directorys_place_is_refused_before_any_data_is_read(script, place, tmp_path):
    (tmp_path / "file").touch()
    done = run(script, "--input", "no-such-data", "--output-dir", tmp_path / place)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'file'} is not a directory; choose another --output-dir\n"


@SCRIPTS
def test_files_are_replaced_only_when_asked(script, tmp_path):
    (tmp_path / "test.parquet").write_text("mine")
    done = run(script, "--input", "no-such-data", "--output-dir", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'test.parquet'} exists; replace it with --overwrite\n"
    write(tmp_path / "train.jsonl", [{"question": "1?", "problem": "1?", "answer": "#### 1"}] * 2)
    write(tmp_path / "test.jsonl", [{"question": "1?", "answer": "#### 1"}])
    source = tmp_path if script == "gsm8k.py" else tmp_path / "train.jsonl"
    more = [] if script == "gsm8k.py" else ["--test-size", 1]
    done = run(script, "--input", source, "--output-dir", tmp_path, "--overwrite", *more)
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "test.parquet")) == 1


def test_a_missing_split_is_named(tmp_path):
    done = run("gsm8k.py", "--input", tmp_path, "--output-dir", tmp_path / "out")
    assert done.returncode == 2 and f"{tmp_path}/train.jsonl does not exist" in done.stderr
