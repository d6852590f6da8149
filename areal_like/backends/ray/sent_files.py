"""Transfer of model directories from the controller's host to nodes that lack them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from areal_like.backends.ray.placement import Placement, on_bundle, ray_errors

CHUNK = 64 << 20  # bytes of a file in one message


async def send_missing(placement: Placement, directories: Iterable[Path]) -> None:
    """Copy directories to the nodes that lack them, under the same paths. Raises ClusterError."""
    import ray

    bundles = {slot.node_id: slot.bundle for slot in placement.slots.values()}
    actor: Any = ray.remote(_writer_class())
    writers = [on_bundle(actor, placement.group, bundle, max_restarts=0).remote() for bundle in bundles.values()]
    try:
        with ray_errors():
            for directory in directories:
                lacks = await asyncio.gather(*(writer.lacks.remote(str(directory)) for writer in writers))
                receivers = [writer for writer, is_missing in zip(writers, lacks, strict=True) if is_missing]
                if receivers:
                    await _send(directory, receivers)
    finally:
        for writer in writers:
            with suppress(Exception):  # the actor has ended with its node or with Ray
                ray.kill(writer)


async def _send(directory: Path, receivers: list[Any]) -> None:
    """Write the files beside the target path; the directory appears when it is complete."""
    partial = directory.with_name(f".{directory.name}.{token_hex(4)}.partial")
    for file in sorted(each for each in directory.rglob("*") if each.is_file()):
        target = str(partial / file.relative_to(directory))
        for chunk in _chunks(file):
            await asyncio.gather(*(receiver.write.remote(target, chunk) for receiver in receivers))
    await asyncio.gather(*(receiver.finish.remote(str(partial), str(directory)) for receiver in receivers))


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield opened.read(CHUNK)
        while chunk := opened.read(CHUNK):
            yield chunk


def _writer_class() -> type:
    """Return a class that Ray sends by value, so that the node does not need this package."""

    class FileWriter:
        def lacks(self, path: str) -> bool:
            import os

            return not os.path.exists(path)

        def write(self, path: str, chunk: bytes) -> None:
            import os

            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "ab") as file:
                file.write(chunk)

        def finish(self, partial: str, path: str) -> None:
            import os
            import shutil

            try:
                os.rename(partial, path)
            except OSError:
                if not os.path.isdir(path):
                    raise
                shutil.rmtree(partial)  # another run has sent it meanwhile

    return FileWriter
