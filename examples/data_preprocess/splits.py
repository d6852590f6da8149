"""Options of the scripts in this folder, and the function that writes `train.parquet` and `test.parquet`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pyarrow
import typer
from pyarrow import parquet

from areal_like.data.rows import DatasetError, Record

OutputDir = Annotated[Path, typer.Option(help="Directory for train.parquet and test.parquet.")]
Instruction = Annotated[str, typer.Option(help="Text after each problem; empty for none.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")]
SPLITS = ("train", "test")


def write_splits(output_dir: Path, overwrite: bool, make: Callable[[], Mapping[str, Sequence[Record]]]) -> None:
    """Write the splits that `make` returns; an error ends the script with one message."""
    files = {split: output_dir / f"{split}.parquet" for split in SPLITS}
    try:
        _check(output_dir, [] if overwrite else list(files.values()))
        splits = make()
        output_dir.mkdir(parents=True, exist_ok=True)
        for split, file in files.items():
            parquet.write_table(pyarrow.Table.from_pylist(splits[split]), file)
            typer.echo(f"{file}: {len(splits[split])} problems")
    except (DatasetError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _check(directory: Path, missing: Sequence[Path]) -> None:
    above = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{above} is not a directory; choose another --output-dir")
    for file in missing:
        if file.exists():
            raise FileExistsError(f"{file} exists; replace it with --overwrite")
