"""The rows of a dataset: files, the Hugging Face hub, `arithmetic`, or a user's object."""

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.core.config.schema import SourceConfig
from areal_like.core.user_code import UserCodeError, load_object, where_it_failed
from areal_like.data.arrow_rows import rows_of_table, without_nulls
from areal_like.data.rows import DatasetError, Record, Records
from areal_like.demo import arithmetic

_LINES, _PARQUET = (".jsonl", ".json", ".jsonl.gz", ".json.gz"), ".parquet"
SUFFIXES = (*_LINES, _PARQUET)
KINDS = "JSONL, JSON or Parquet"
_ABOUT = {"dataset_infos.json", "dataset_info.json", "state.json"}  # of the datasets library, beside a dataset's files
# Names of splits, as files of the hub have them
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev"),
}
_PER_LINE = "write one object per line, in UTF-8"


def read_files(paths: Sequence[str], split: str) -> Records:
    """Return the rows of files, of folders and of the files that patterns match; raises DatasetError."""
    files = [file for path in paths for file in _find_files(path, split)]
    parts = [(file, _read_file(file)) for file in files]
    return Records.of_parts(parts, keeps_nulls=not any(file.endswith(_PARQUET) for file in files))


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern of file names such as `data/*.jsonl`."""
    return glob.has_magic(path) and not os.path.exists(path)


def _find_files(path: str, split: str) -> list[str]:
    """Return the files that a path names, in the order of their names."""
    if os.path.isdir(path):
        return _files_in(path, split)
    found = [path]
    if is_pattern(path):
        found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        if not found:
            raise _path_error(f"{path} matches no file", "correct the pattern")
    for file in found:
        if not os.path.isfile(file):
            raise _path_error(f"{file} does not exist", f"name {KINDS} files, folders of them, or a pattern")
        if not file.endswith(SUFFIXES):
            raise _path_error(f"{file} is not a {KINDS} file", f"rename or convert it to {', '.join(SUFFIXES)}")
    return found


def _files_in(folder: str, split: str) -> list[str]:
    """Return the files of a folder and its subfolders; if they are of several splits, only the files of `split`."""
    every = [file for file in sorted(Path(folder).rglob("*")) if file.is_file() and not _is_hidden(file, folder)]
    found = [file for file in every if file.name.endswith(SUFFIXES) and file.name not in _ABOUT]
    if any(file.suffix == ".arrow" for file in every):
        raise _path_error(f"{folder} has files of save_to_disk, which are not read", "write it with to_parquet")
    if not found:
        raise _path_error(f"{folder} is a folder without {KINDS} files", f"name a folder with {', '.join(SUFFIXES)}")
    splits = {file: _split_of(file.relative_to(folder)) for file in found}
    if any(splits.values()):
        if unnamed := [file for file, name in splits.items() if name is None]:
            problem = f"{folder} has files of splits, and {unnamed[0]} is of none of them"
            raise _path_error(problem, "name the files by a pattern or in a list")
        found = [file for file in found if splits[file] == _split_name(split)]
        if not found:
            there = ", ".join(sorted(map(str, set(splits.values()))))
            problem = f"{folder} has files of the splits {there}, and none of {split}"
            raise DatasetError("split", problem, "set split to one of them")
    if len({file.suffix == _PARQUET for file in found}) > 1:
        raise _path_error(f"{folder} has files of JSON and of Parquet", f"name one kind, as {folder}/**/*{_PARQUET}")
    return [str(file) for file in found]


def _is_hidden(file: Path, folder: str) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _split_of(file: Path) -> str | None:
    """Return the split in a file's name or in the names of its folders, if there is one."""
    words = re.split(r"[^a-z]+", str(file).lower())
    return next((name for name, spellings in _SPLITS.items() if any(word in spellings for word in words)), None)


def _split_name(split: str) -> str:
    return next((name for name, spellings in _SPLITS.items() if split in spellings), split)


def _path_error(problem: str, remedy: str) -> DatasetError:
    return DatasetError("path", problem, remedy)


def _read_file(path: str) -> Sequence[Record]:
    return _read_parquet(path) if path.endswith(_PARQUET) else list(_read_json(path))


def _read_parquet(path: str) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        return rows_of_table(parquet.read_table(path))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DatasetError("path", f"{path} cannot be read as Parquet: {error}", "write it again") from error
    except KeyError as error:  # of a map column
        raise DatasetError("path", f"{path} has a map with a key twice: {error}", "write it again") from error


def _read_json(path: str) -> Iterator[Record]:
    """Yield the rows of a file: lines of JSON, or one list of objects."""
    data = _read_text(path)
    if not path.endswith((".json", ".json.gz")):
        return _read_lines(path, data)
    try:
        content = json.loads(data)
    except ValueError as error:
        if data.lstrip().startswith(b"["):
            raise DatasetError("path", f"{path} is not JSON: {error}", "write a list of objects") from error
        return _read_lines(path, data)
    return _objects(path, content if isinstance(content, list) else [content])


def _objects(path: str, rows: Sequence[Any]) -> Iterator[Record]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DatasetError("path", f"{path}, row {number} is not an object", "write a list of objects")
        yield row


def _read_lines(path: str, data: bytes) -> Iterator[Record]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise DatasetError("path", f"{place} is not UTF-8: {error}", "convert the file to UTF-8") from error
        except ValueError as error:
            raise DatasetError("path", f"{place} is not JSON: {error}", _PER_LINE) from error
        if not isinstance(row, dict):
            fix = "name a list of objects .json" if isinstance(row, list) else _PER_LINE
            raise DatasetError("path", f"{place} is not an object", fix)
        yield row


def _read_text(path: str) -> bytes:
    """Return the content of a file, unpacked, in UTF-8 as far as its first bytes show."""
    try:
        data = gzip.decompress(Path(path).read_bytes()) if path.endswith(".gz") else Path(path).read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError("path", f"{path} is not a whole gzip file: {error}", "pack it again") from error
    except OSError as error:
        raise DatasetError("path", f"{path} cannot be read: {error}", "make it readable") from error
    encoding = json.detect_encoding(data[:4])
    if not encoding.startswith("utf-8"):
        name = encoding.upper()
        remedy = f"convert it: iconv -f {name} -t UTF-8 {path} > FILE"
        raise DatasetError("path", f"{path} is {name} text, and JSON is read as UTF-8", remedy)
    return data


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
