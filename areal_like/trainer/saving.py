"""Writes checkpoints while training continues, in torch's distributed format."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class Saving:
    """Output of `write` in the directory `path`, together with that of the other ranks, in a thread of its own.

    `write` calls torch's `distributed.checkpoint.save`, with a process group of its own, and a state that does not
    change meanwhile.
    """

    def __init__(self, path: Path, write: Callable[[], object]) -> None:
        self._path = path
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = thread.submit(write)
        thread.shutdown(wait=False)

    def is_written(self) -> bool:
        """Return whether the shares of all ranks are on disk. Raises OSError where one cannot be."""
        if done := self._writing.done():
            self._wait()
        return done

    def finish(self) -> None:
        """Return when the checkpoint is complete; every rank calls it. Raises OSError as `is_written`."""
        self._wait()
        dist.barrier()

    def _wait(self) -> None:
        try:
            self._writing.result()
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            free = disk_usage(self._path).free >> 20  # stated because torch's message hides that a disk is full
            raise OSError(f"{self._path} cannot be written; {free} MiB are free there: {cause}") from error
