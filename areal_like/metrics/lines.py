"""Files of one JSON object per line, which are whole up to the last line however a run ends."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from areal_like.errors import RecordError, private, writing

_END_OF_LINE = re.compile("[\x85\u2028\u2029]")


class Lines:
    """A file that is appended to; everything is on disk when `write` returns. Raises RecordError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", opener=private)  # noqa: SIM115

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows."""
        with writing(self._path):
            self._file.writelines(f"{as_json(row)}\n" for row in rows)
            self._file.flush()

    def close(self) -> None:
        """End the file."""
        with writing(self._path):
            self._file.close()


def as_json(value: Any) -> str:
    """One line of JSON, also to readers that know Unicode's ends of lines; numbers that are not finite are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False)
    return _END_OF_LINE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_rows[T](path: Path, kind: type[T]) -> list[T]:
    """The rows of a file as what they are; [] where there is none. Lines that a kill cut off are left out.

    Raises OSError, and RecordError where a line is something else, or all of several lines are cut off.
    """
    adapter, rows = TypeAdapter(kind), []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(adapter.validate_json(line, strict=True))
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":
                raise RecordError(f"{path} is not what a run writes: line {number}: {first_of(error)}") from error
    if len(lines) > 2 and not rows:
        raise RecordError(f"{path} is not what a run writes: no line of it is JSON")
    return rows


def first_of(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    found = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, found['loc'])) or 'all of it'}: {found['msg']}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written, which takes its place when the body has ended without an exception."""
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
