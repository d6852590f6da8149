"""The trainer's side of weights that servers read on the same device; imported by trainer ranks only."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from areal_like.backends.transports.buckets import Buckets
from areal_like.backends.transports.ipc.handles import device_name, export_handle
from areal_like.core.trainer.engine import TrainEngine


class IpcSender(Buckets):
    """Exports every bucket to the servers' ranks on the same GPU; on CPU rank 0 exports to all of them."""

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        super().__init__(engine, rank, on_each=True)
        self._exported: Tensor | None = None
        self._file: Path | None = None

    def export(self, number: int, directory: Path, ranks: Collection[int] | None = None) -> tuple[str, str] | None:
        """Export this bucket, and no other, if this rank is one of `ranks`; without `ranks` every rank exports.

        Return the device's name and the handle, or None if other ranks export.
        """
        self.end()
        self.prepare(number)
        if not self.ready:
            return None
        bucket = self.ready.pop()
        if ranks is not None and self._rank not in ranks:
            return None
        self._exported, self._file = bucket, directory / "bucket"
        return device_name(self._exported.device), export_handle(self._exported, self._file)

    def end(self) -> None:
        """Release the exported bucket: every server has read it."""
        self._exported = None
        if self._file:
            self._file.unlink(missing_ok=True)
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()
