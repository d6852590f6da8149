"""Files that are complete or absent, even after a crash of the machine, and file systems that may hang."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areal_like.core.errors import CheckpointError, writing


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically; on return, it is on disk. Raises RecordError."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        partial.unlink(missing_ok=True)  # its mode may differ
        with open(partial, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)


def append_durably(path: Path, line: str) -> None:
    """Append a line; on return, it is on disk. A failed call leaves no part of it. Raises RecordError."""
    with writing(path), open(path, "ab", buffering=0) as file:
        size, left = os.fstat(file.fileno()).st_size, memoryview(line.encode())
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise an OSError of the body, such as an I/O error, as a CheckpointError about `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(
            f"{path} cannot be read: {reason}. The run does not start, so that nothing of it is lost. Make the file "
            "readable and run the same command again, or choose another trial_name"
        ) from error


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, [] where it is missing. Raises CheckpointError."""
    with reading(directory):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes, None where it is missing. Raises CheckpointError."""
    with reading(path):
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None


async def call_disk[T](function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread of its own; a hung call blocks neither the caller's end nor this process's exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(settle_it: Callable[[Any], None], value: Any) -> None:
        def now() -> None:
            if not answer.done():
                settle_it(value)

        with suppress(RuntimeError):  # the loop is closed, so the caller has stopped waiting
            loop.call_soon_threadsafe(now)

    def call() -> None:
        try:
            settle(answer.set_result, function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            settle(answer.set_exception, error)

    threading.Thread(target=call, name="disk", daemon=True).start()
    return await answer
