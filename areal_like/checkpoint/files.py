"""Files that are whole or not there, whenever the machine stops."""

import os
from pathlib import Path

from areal_like.errors import writing


def write_durably(path: Path, text: str) -> None:
    """Write a file; when this returns it is on disk, and until then the old one is. Raises RecordError."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
