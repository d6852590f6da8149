"""One trainer rank as a Ray actor: an engine, and this rank's end of the weight transport.

The controller imports this to start actors, so torch is imported inside the methods only.
"""

from __future__ import annotations

from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from areal_like.cluster.lifetime import listen
from areal_like.trainer.engine import EngineSpec, Rendezvous, TrainEngine
from areal_like.types import Batch, Floats, LossSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from areal_like.weights.collective.rank import CollectiveSender


class TrainerRank:
    """What `areal_like.trainer.remote.Trainer` calls on each rank; `address` is the rank's own."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self._rank, self._world_size, self._address = rank, world_size, address
        self._listener: socket | None = None
        self._sender: CollectiveSender | None = None

    def listen(self) -> tuple[str, int]:
        """Open the socket at which the ranks will meet; returns its address and port. Rank 0 only."""
        self._listener = listen(self._address)
        return self._address, self._listener.getsockname()[1]

    def build(self, address: str, port: int, timeout_s: float, spec: EngineSpec) -> None:
        """Meet the other ranks and build the engine. Raises ValueError for a backend that nobody wrote."""
        if spec.backend != "megatron":
            raise ValueError(f"no trainer runs on {spec.backend}; megatron is the one there is")
        from areal_like.trainer.megatron.engine import MegatronEngine

        rendezvous = Rendezvous(self._rank, self._world_size, address, port, timeout_s, self._listener)
        self._engine: TrainEngine = MegatronEngine(spec, rendezvous)

    def log_probs(self, batch: Batch, temperature: float) -> tuple[NDArray[np.int64], Floats] | None:
        """This rank's share of the batch's log-probs."""
        return self._engine.log_probs(batch, temperature)

    def train(self, batch: Batch, loss: LossSpec, temperature: float, learning_rate: float | None) -> dict[str, float]:
        """One optimizer step."""
        return self._engine.train(batch, loss, temperature=temperature, learning_rate=learning_rate)

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face checkpoint."""
        self._engine.save_hf(path)

    def transfer(self, step: str, *arguments: Any) -> Any:
        """One step of a CollectiveSender, which lasts as long as the engine."""
        from areal_like.weights.collective.rank import CollectiveSender

        if self._sender is None:
            self._sender = CollectiveSender(self._engine, self._rank, self._address)
        return getattr(self._sender, step)(*arguments)
