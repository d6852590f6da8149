"""Writes checkpoints while training continues, in torch's distributed format."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class Saving:
    """A thread that runs `write` for this rank's part of a checkpoint in the directory `path`.

    `write` calls torch's `distributed.checkpoint.save`, with its own process group and a state that does not change
    meanwhile; it moves tensors of a device to the host in small chunks.
    """

    def __init__(self, path: Path, write: Callable[[], object]) -> None:
        self._path = path
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = thread.submit(write)
        thread.shutdown(wait=False)

    def is_written(self) -> bool:
        """Return whether the shares of all ranks are on disk. Raises OSError if a write failed."""
        if done := self._writing.done():
            self.wait()
        return done

    def finish(self) -> None:
        """Wait until the checkpoint is complete; every rank calls this method. Raises OSError as `is_written`."""
        self.wait()
        dist.barrier()

    def wait(self) -> None:
        """Wait until this rank's share is on disk. Raises OSError if the write failed."""
        try:
            self._writing.result()
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            free = disk_usage(self._path).free >> 20  # torch's message does not show that a disk is full
            raise OSError(f"{self._path} cannot be written; {free} MiB are free there: {cause}") from error
