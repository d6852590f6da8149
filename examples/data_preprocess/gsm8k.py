"""Write GSM8K as `train.parquet` and `test.parquet`.

`question` is the problem followed by an instruction on how to give the answer; `answer` is the reference solution,
which ends in `#### N`.

    python examples/data_preprocess/gsm8k.py --output-dir data/gsm8k
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from splits import SPLITS, Instruction, OutputDir, Overwrite, write_splits

from areal_like.core.config.schema import DatasetConfig
from areal_like.data.records import read_records
from areal_like.data.rows import DatasetError, Record

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(
    output_dir: OutputDir,
    input: Annotated[
        str, typer.Option(help="Dataset on the hub, or a directory with train and test as .jsonl or .parquet.")
    ] = "openai/gsm8k",
    instruction: Instruction = INSTRUCTION,
    overwrite: Overwrite = False,
) -> None:
    """Write GSM8K's two splits as Parquet, ready to train from."""

    def rows(split: str) -> list[dict[str, str]]:
        return [row(record, instruction, n) for n, record in enumerate(read(input, split), 1)]

    write_splits(output_dir, overwrite, lambda: {split: rows(split) for split in SPLITS})


def read(source: str, split: str) -> Sequence[Record]:
    """Return the rows of one split of a local directory or of a dataset on the hub."""
    if Path(source).is_file():
        raise DatasetError("path", f"{source} is one file", "name the directory of train and test")
    if not Path(source).is_dir():
        return read_records(DatasetConfig(path=source, name="main", split=split)).rows
    files = [Path(source, split + suffix) for suffix in (".jsonl", ".parquet")]
    file = next((file for file in files if file.is_file()), files[0])
    return read_records(DatasetConfig(path=str(file))).rows


def row(record: Record, instruction: str, number: int) -> dict[str, str]:
    """Return one problem; raise DatasetError if the answer does not have GSM8K's form."""
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
        raise DatasetError(
            "path", f"row {number} is not a GSM8K problem", "it needs `question`, and `answer` with `#### N`"
        )
    return {"question": f"{question} {instruction}".strip(), "answer": answer}


if __name__ == "__main__":
    typer.run(main)
