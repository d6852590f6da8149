"""Rollback of the files of steps that a run will repeat."""

from pathlib import Path

from areal_like.errors import writing
from areal_like.metrics.lines import as_json, read_rows, replacing
from areal_like.metrics.names import METRICS_FILE
from areal_like.metrics.samples import FOLDER


def forget(directory: Path, step: int) -> None:
    """Remove metrics and samples of `step` and later steps. Raises RecordError."""
    metrics = directory / METRICS_FILE
    with writing(metrics):
        kept = [row for row in read_rows(metrics, dict[str, int | float | None]) if (row.get("step") or 0) < step]
        with replacing(metrics) as partial:
            partial.write_text("".join(f"{as_json(row)}\n" for row in kept))
        for file in (directory / FOLDER).glob("*-*.jsonl"):
            number = file.stem.split("-")[1]
            if number.isdigit() and int(number) >= step:
                file.unlink()
