"""One trainer rank as a Ray actor: an engine, and rank 0's end of the weight update group.

The controller imports this to start actors, so torch is imported inside the methods only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.cluster.lifetime import listen
from areal_like.trainer.remote import TensorSpec
from areal_like.types import Batch, Floats, LossSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TrainerRank:
    """What `areal_like.trainer.remote.Trainer` calls on each rank; `address` is the rank's own."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self._rank, self._world_size, self._address = rank, world_size, address
        self._listener: Any = None

    def listen(self) -> tuple[str, int]:
        """Open the socket at which the ranks will meet; returns its address and port. Rank 0 only."""
        self._listener = listen(self._address)
        return self._address, self._listener.getsockname()[1]

    def build(self, address: str, port: int, timeout_s: float, arguments: dict[str, Any]) -> None:
        """Meet the other ranks and build the engine with `arguments`, MegatronEngine's own."""
        from areal_like.trainer.megatron.engine import MegatronEngine
        from areal_like.trainer.rendezvous import Rendezvous
        from areal_like.weights.collective.rank import Broadcaster

        rendezvous = Rendezvous(self._rank, self._world_size, address, port, timeout_s)
        self._engine = MegatronEngine(rendezvous=rendezvous, listener=self._listener, **arguments)
        self._broadcaster = Broadcaster()

    def log_probs(self, batch: Batch, temperature: float) -> tuple[NDArray[np.int64], Floats] | None:
        """This rank's share of the batch's log-probs."""
        return self._engine.log_probs(batch, temperature)

    def train(self, batch: Batch, loss: LossSpec, temperature: float, learning_rate: float | None) -> dict[str, float]:
        """One optimizer step."""
        return self._engine.train(batch, loss, temperature=temperature, learning_rate=learning_rate)

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face checkpoint."""
        self._engine.save_hf(path)

    def open_weight_store(self, world_size: int, group: str, timeout_s: float) -> tuple[str, int]:
        """Listen for the weight update group; rank 0 only."""
        return self._broadcaster.open_store(self._address, world_size, group, timeout_s)

    def join_weight_group(self, backend: str) -> None:
        """Join the weight update group; rank 0 only."""
        self._broadcaster.join(backend)

    def weight_buckets(self, bucket_mb: int) -> list[list[TensorSpec]]:
        """What `broadcast_weights` will send."""
        from areal_like.weights.collective.rank import specs

        return specs(self._engine.weights(bucket_mb))

    def broadcast_weights(self, bucket_mb: int) -> None:
        """Send the weights from rank 0; the other ranks take part in gathering them."""
        buckets = self._engine.weights(bucket_mb)
        if self._rank == 0:
            self._broadcaster.send(buckets)
        else:
            for _ in buckets:
                pass
