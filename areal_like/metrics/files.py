"""What becomes of an error of the file system, such as a full disk, while a run writes down its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_like.errors import RecordError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell an OSError of the body as a RecordError about `path`."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error
