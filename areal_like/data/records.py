"""The rows of a dataset: JSONL, Parquet, the Hugging Face hub, `arithmetic`, or a user's object."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.config.schema import SourceConfig
from areal_like.demo import arithmetic
from areal_like.runtime.user_code import UserCodeError, load_object, where_it_failed

type Record = Mapping[str, Any]

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_REFERENCE = re.compile(r".+:[\w.]+")


class DatasetError(Exception):
    """A dataset that cannot be used.

    `code` is the code of the finding, `field` the faulty field of the dataset's config; `problem` names file and row,
    `remedy` is the fix.
    """

    def __init__(self, field: str, problem: str, remedy: str, *, code: str = "RUN-DATASET-FILE") -> None:
        super().__init__(f"{problem}; {remedy}")
        self.code, self.field, self.problem, self.remedy = code, field, problem, remedy


def read_records(config: SourceConfig) -> Sequence[Record]:
    """Return the rows of a dataset, at least one; raises DatasetError."""
    path = config.path
    if path == "arithmetic":
        return _read_arithmetic(config)
    if _REFERENCE.fullmatch(path) and not os.path.exists(path):
        return _read_object(path)
    if problem := _path_problem(path):
        remedy = "name a JSONL or Parquet file, a dataset of the hub as owner/name, or my_data.py:rows"
        raise DatasetError("path", f"{path} {problem}", remedy, code="RUN-DATASET-PATH")
    read = {"jsonl": _read_jsonl, "parquet": _read_parquet}.get(path.rpartition(".")[2])
    if not (records := read(path) if read else _read_hub(config)):
        raise DatasetError("path", f"{path} has no rows", "give it at least one problem", code="RUN-DATASET-EMPTY")
    return records


def folder_of(path: str) -> Path:
    """Return the folder that paths in a dataset's rows are relative to: the file's folder, else the current one."""
    return Path(path).absolute().parent if os.path.isfile(path) else Path.cwd()


def value_at(record: Record, field: str) -> Any:
    """Return the value of a column or a field nested in it, such as `reward_model.ground_truth`; None without one."""
    if field in record:
        return record[field]
    value: Any = record
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _rows_of(rows: Any, name: str) -> list[Record]:
    """Return the rows of an object like torch.utils.data.Dataset: it has a length, and `rows[i]` is a dict of columns.

    A function is called to get such an object. Raises DatasetError, whose message names the object `name`.
    """
    records: list[Record] = []
    try:
        rows = rows() if callable(rows) and not hasattr(rows, "__getitem__") else rows
        for index in range(len(rows)):
            records.append(rows[index])
    except (Exception, SystemExit) as error:  # a user's object may raise anything
        reason = where_it_failed(error, name.rpartition(":")[0] or name)
        remedy = "write __len__ and __getitem__(index), which returns a dict, or a function that returns such an object"
        problem = f"{name}, row {len(records) + 1} cannot be read: {reason}"
        raise DatasetError("path", problem, remedy, code="RUN-DATASET-CODE") from error
    for row, record in enumerate(records, 1):
        if not isinstance(record, Mapping):
            problem = f"{name}, row {row} is {type(record).__name__}, not a dict of columns"
            raise DatasetError("path", problem, "have __getitem__ return a dict", code="RUN-DATASET-CODE")
    return records


def _read_object(reference: str) -> list[Record]:
    try:
        found = load_object(reference)
    except UserCodeError as error:
        raise DatasetError("path", str(error), "correct it", code="RUN-DATASET-CODE") from error
    if not (records := _rows_of(found, reference)):
        raise DatasetError("path", f"{reference} has no rows", "give it at least one problem", code="RUN-DATASET-EMPTY")
    return records


def _path_problem(path: str) -> str | None:
    """Return why a path is neither a readable file nor a name on the hub.

    The datasets library would take other names for a folder or one of its builders, and read the files there.
    """
    readable = path.endswith((".jsonl", ".parquet"))
    if os.path.isfile(path):
        return None if readable else "is neither JSONL nor Parquet"
    if os.path.exists(path):
        return "is not a file"
    return None if _HUB_NAME.fullmatch(path) and not readable else "does not exist"


def _read_arithmetic(config: SourceConfig) -> list[dict[str, str]]:
    if config.split not in arithmetic.SPLITS:
        problem = f"arithmetic has no split {config.split}"
        raise DatasetError("split", problem, "write train or test", code="RUN-DATASET-SPLIT")
    settings = config.arithmetic
    return arithmetic.generate(settings.size, settings.max_number, settings.seed, config.split)


def _read_jsonl(path: str) -> list[Record]:
    records: list[Record] = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise DatasetError(
            "path", f"{path} cannot be read: {error}", "make it readable", code="RUN-DATASET-FILE"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            records += [json.loads(line)] if line.strip() else []
        except ValueError as error:  # not JSON, or not UTF-8
            problem = f"{path}, line {number} is not JSON: {error}"
            raise DatasetError("path", problem, "write one object per line", code="RUN-DATASET-FILE") from error
        if records and not isinstance(records[-1], dict):
            problem = f"{path}, line {number} is not an object"
            raise DatasetError("path", problem, "write one object per line", code="RUN-DATASET-FILE")
    return records


def _read_parquet(path: str) -> list[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"{path} cannot be read as Parquet: {error}"
        raise DatasetError("path", problem, "write it again", code="RUN-DATASET-FILE") from error


def _read_hub(config: SourceConfig) -> Sequence[Record]:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return datasets.load_dataset(config.path, config.name, split=config.split).to_list()
    except (datasets.exceptions.DatasetsError, HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        problem = f"is neither a .jsonl or .parquet file nor a dataset on the hub or in its cache: {reason}"
        remedy = "check the name, `name` and `split`, or prepare a Parquet file"
        raise DatasetError("path", f"{config.path} {problem}", remedy, code="RUN-DATASET-HUB") from error
