"""The trainer's end of `weight_update.mode: disk`."""

from __future__ import annotations

from pathlib import Path

from areal_like.trainer.engine import TrainEngine


class DiskSender:
    """Writes what the servers read."""

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        self._engine = engine

    def open(self) -> None:
        """Nothing lasts longer than one version."""

    def send(self, path: Path) -> None:
        """Write a Hugging Face checkpoint."""
        self._engine.save_hf(path)

    def close(self) -> None:
        """Nothing is left."""
