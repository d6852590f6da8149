"""The limit of a log that other processes append to."""

import os
from contextlib import suppress
from pathlib import Path

LOG_BYTES, KEPT_BYTES = 64 << 20, 16 << 20


def shorten_log(log: Path) -> None:
    """Cut a log of more than LOG_BYTES to its last KEPT_BYTES; its processes go on appending to it."""
    with suppress(OSError):  # the file was removed, or the disk is full: the process matters more
        size = log.stat().st_size
        if size > LOG_BYTES:
            with log.open("rb") as file:
                file.seek(size - KEPT_BYTES)
                rest = file.read(KEPT_BYTES)
            os.truncate(log, 0)
            with log.open("ab") as file:
                file.write(rest)
