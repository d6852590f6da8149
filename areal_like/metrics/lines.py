"""Files with one JSON object per line, complete up to the last line however a run ends."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from areal_like.core.errors import RecordError, private, writing

_END_OF_LINE = re.compile("[\x85\u2028\u2029]")


class Appended:
    """A file that is appended to; `write` returns when the text is in the file. Raises RecordError.

    A failed write leaves no part of its text.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115
            self.size = self._file.tell()

    def write(self, text: str) -> None:
        """Append a text."""
        data = text.encode()
        left = memoryview(data)
        with writing(self._path):
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(self.size)
                raise
        self.size += len(data)

    def close(self) -> None:
        """End the file."""
        with writing(self._path):
            self._file.close()


class Lines:
    """A file of rows that is appended to. Raises RecordError."""

    def __init__(self, path: Path) -> None:
        self._file = Appended(path)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._file.size

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows."""
        self._file.write("".join(f"{as_json(row)}\n" for row in rows))

    def close(self) -> None:
        """End the file."""
        self._file.close()


def as_json(value: Any) -> str:
    """Return one line of JSON, also for readers that split lines at Unicode separators; infinities and NaN are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False)
    return _END_OF_LINE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_rows[T](path: Path, kind: type[T]) -> list[T]:
    """Return the rows of a file as `kind`; see `rows_of`."""
    return list(rows_of(path, kind))


def rows_of[T](path: Path, kind: type[T]) -> Iterator[T]:
    """Read the rows of a file one by one; none if it is missing. Skips lines that were cut off by a kill.

    Raises OSError, and RecordError if a line has other content, or if all of several lines are cut off.
    """
    adapter, rows, number = TypeAdapter(kind), 0, 0
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                row = adapter.validate_json(line, strict=True)
            except ValidationError as error:
                if error.errors()[0]["type"] != "json_invalid":
                    raise RecordError(f"{path} was not written by a run: line {number}: {first_of(error)}") from error
                continue
            rows += 1
            yield row
    if number > 1 and not rows:
        raise RecordError(f"{path} was not written by a run: no line of it is JSON")


def first_of(error: ValidationError) -> str:
    """Return the first error and its place."""
    found = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or 'all of it'}: {found['msg']}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the body ends without an exception."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
