"""Write DeepScaleR's competition problems as `train.parquet` and `test.parquet`.

The fields are those of GSM8K: `question` is the problem followed by an instruction on how to give the answer; `answer`
is `#### ` and the reference answer, which may be LaTeX. The dataset has one split; `test` is a seeded sample of it.

    python examples/data_preprocess/deepscaler.py --output-dir data/deepscaler
"""

from __future__ import annotations

import random
from typing import Annotated

import typer
from splits import Instruction, OutputDir, Overwrite, write_splits

from areal_like.core.config.schema import DatasetConfig
from areal_like.data.records import read_records
from areal_like.data.rows import DatasetError, Record

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def main(
    output_dir: OutputDir,
    input: Annotated[
        str, typer.Option(help="Dataset on the hub, or a .jsonl or .parquet file with `problem` and `answer`.")
    ] = "agentica-org/DeepScaleR-Preview-Dataset",
    instruction: Instruction = INSTRUCTION,
    test_size: Annotated[int, typer.Option(min=1, help="Problems to hold out.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the choice.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write DeepScaleR's problems as Parquet, ready to train from."""

    def splits() -> dict[str, list[dict[str, str]]]:
        rows = [row(record, instruction, n) for n, record in enumerate(read_records(DatasetConfig(path=input)).rows, 1)]
        if test_size >= len(rows):
            raise DatasetError("path", f"{input} has only {len(rows)} problems", "hold out fewer with --test-size")
        random.Random(seed).shuffle(rows)
        return {"train": rows[test_size:], "test": rows[:test_size]}

    write_splits(output_dir, overwrite, splits)


def row(record: Record, instruction: str, number: int) -> dict[str, str]:
    """Return one problem; raise DatasetError if a field is missing."""
    problem, answer = record.get("problem"), record.get("answer")
    if not isinstance(problem, str) or not isinstance(answer, str | int | float):
        raise DatasetError("path", f"row {number} is not a DeepScaleR problem", "it needs `problem` and `answer`")
    return {"question": f"{problem} {instruction}".strip(), "answer": f"#### {answer}"}


if __name__ == "__main__":
    typer.run(main)
