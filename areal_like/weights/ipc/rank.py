"""The trainer's end of weights that are handed over on the device; imported by trainer ranks only."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from areal_like.rollout.sglang.ipc import device_name, lend
from areal_like.trainer.engine import TrainEngine
from areal_like.weights.buckets import Buckets


class IpcSender(Buckets):
    """Every rank gathers every bucket and lends it to the servers' ranks on its own GPU; on CPU rank 0 lends to all."""

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        super().__init__(engine, rank, on_each=True)
        self._lent: Tensor | None = None
        self._file: Path | None = None

    def lend(self, number: int, directory: Path, ranks: Collection[int] | None = None) -> tuple[str, str] | None:
        """Lend this bucket, and no other any more, if this is one of the `ranks` that do; all do without them.

        Returns the device's name and the loan, None where others lend.
        """
        self.end()
        self.prepare(number)
        if not self.ready:
            return None
        bucket = self.ready.pop()
        if ranks is not None and self._rank not in ranks:
            return None
        self._lent, self._file = bucket, directory / "bucket"
        return device_name(self._lent.device), lend(self._lent, self._file)

    def end(self) -> None:
        """Nobody borrows any more."""
        self._lent = None
        if self._file:
            self._file.unlink(missing_ok=True)
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()
