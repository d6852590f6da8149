"""Files of one JSON object per line, which are whole up to the last line however a run ends."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_like.errors import writing

_END_OF_LINE = re.compile("[\x85\u2028\u2029]")


class Lines:
    """A file that is appended to; everything is on disk when `write` returns. Raises RecordError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; [] where there is none. A last line that was cut off is left out. Raises OSError."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
