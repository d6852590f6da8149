"""The trainer's end of weights that are handed over on the device; imported by trainer ranks only."""

from pathlib import Path

import torch
from torch import Tensor

from areal_like.rollout.sglang.ipc import device_name, lend
from areal_like.trainer.engine import TrainEngine
from areal_like.weights.buckets import Buckets


class IpcSender(Buckets):
    """Every rank gathers every bucket and lends it to the servers' ranks on its own GPU; on CPU rank 0 lends to all.

    Buckets are lent until others are, and the next one is prepared meanwhile.
    """

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        super().__init__(engine, rank, on_each=True)
        self._lent: list[Tensor] = []
        self._files: list[Path] = []

    def lend(self, directory: Path) -> tuple[str, list[str]] | None:
        """Lend all that is prepared; returns the device's name and the loans, None where another rank does."""
        self.end()
        if not self.ready:
            return None
        self._lent = list(self.ready)
        self.ready.clear()
        self._files = [directory / f"bucket-{place}" for place in range(len(self._lent))]
        loans = [lend(flat, file) for flat, file in zip(self._lent, self._files, strict=True)]
        return device_name(self._lent[0].device), loans

    def end(self) -> None:
        """Nobody borrows any more."""
        self._lent.clear()
        for file in self._files:
            file.unlink(missing_ok=True)
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()
