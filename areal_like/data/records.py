"""The rows of a dataset: files, the Hugging Face hub, `arithmetic`, or a user's object."""

import os
import re
from collections.abc import Mapping
from typing import Any

from areal_like.config.schema import SourceConfig
from areal_like.data.arrow_rows import without_nulls
from areal_like.data.row_files import KINDS, SUFFIXES, is_pattern, read_files
from areal_like.data.rows import DatasetError, Record, Records
from areal_like.demo import arithmetic
from areal_like.runtime.user_code import UserCodeError, load_object, where_it_failed

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_REFERENCE = re.compile(r".+:[\w.]+")


def read_records(config: SourceConfig) -> Records:
    """Return the rows of a dataset, at least one; raises DatasetError."""
    records = _read(config)
    if not records.rows:
        problem = f"{config.label} has no rows"
        raise DatasetError("path", problem, "give it at least one problem")
    return records


def _read(config: SourceConfig) -> Records:
    path = config.path
    if not isinstance(path, str):
        return read_files(path, config.split)
    if path == "arithmetic":
        rows = _read_arithmetic(config)
        return Records(rows, [(path, len(rows))])
    if os.path.exists(path) or is_pattern(path) or path.endswith(SUFFIXES):
        return read_files([path], config.split)
    if _REFERENCE.fullmatch(path):
        return _read_object(path)
    if not _HUB_NAME.fullmatch(path):
        remedy = f"name {KINDS} files, a folder, a dataset of the hub as owner/name, or my_data.py:rows"
        raise DatasetError("path", f"{path} does not exist", remedy)
    return _read_hub(config, path)


def _rows_of(rows: Any, name: str) -> Records:
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
    schema = getattr(getattr(rows, "features", None), "arrow_schema", None)  # of a datasets.Dataset
    if schema is not None:
        return Records(without_nulls(records, schema, decoded=True), [(name, len(records))], keeps_nulls=False)
    return Records(records, [(name, len(records))])


def _read_object(reference: str) -> Records:
    try:
        found = load_object(reference)
    except UserCodeError as error:
        raise DatasetError("path", str(error), "correct it", code="RUN-DATASET-CODE") from error
    return _rows_of(found, reference)


def _read_arithmetic(config: SourceConfig) -> list[dict[str, str]]:
    if config.split not in arithmetic.SPLITS:
        problem = f"arithmetic has no split {config.split}"
        raise DatasetError("split", problem, "write train or test")
    settings = config.arithmetic
    return arithmetic.generate(settings.size, settings.max_number, settings.seed, config.split)


def _read_hub(config: SourceConfig, path: str) -> Records:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = datasets.load_dataset(path, config.name, split=config.split)
    except (datasets.exceptions.DatasetsError, HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        problem = f"is neither a {KINDS} file nor a dataset on the hub or in its cache: {reason}"
        remedy = "check the name, `name` and `split`, or prepare a Parquet file"
        raise DatasetError("path", f"{path} {problem}", remedy) from error
    rows = without_nulls(found.to_list(), found.features.arrow_schema, decoded=True)
    return Records(rows, [(path, len(rows))], keeps_nulls=False)
