"""The trainer's side of weights by full copies and deltas; imported by trainer ranks only."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from areal_like.rollout.sglang.checksum import checksum
from areal_like.rollout.sglang.deltas import differences, write_delta, write_full
from areal_like.trainer.engine import TrainEngine


@dataclass(frozen=True)
class Written:
    """A file: its checksum, its size in bytes, that of the weights, and whether it is a full copy."""

    sha256: str
    bytes: int
    weights: int
    is_full: bool


class DeltaSender:
    """Gathers the weights on every rank; rank 0 keeps them in host memory, and writes what has changed since."""

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        self._engine, self._rank = engine, rank
        self._held: dict[str, Tensor] = {}
        self._last: str | None = None  # the file after which a server has the held weights
        self.sums: dict[str, Tensor] | None = None  # checksums of what is gathered, once somebody has asked for them

    def write(self, path: Path, after: str | None) -> Written | None:
        """Write the weights as a delta to the file `after`, or as a full copy if that is not the last one."""
        is_full, self._last = after is None or after != self._last, None
        pieces: dict[tuple[str, int], Tensor] = {}
        for name, tensor in self._engine.weights():
            if self.sums is not None:
                self.sums[name] = checksum(tensor)
            if self._rank == 0:
                self._take(name, tensor, None if is_full else pieces)
        if self._rank:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        sha256 = write_full(path, self._held) if is_full else write_delta(path, pieces)
        self._last = path.name
        return Written(sha256, path.stat().st_size, sum(tensor.nbytes for tensor in self._held.values()), is_full)

    def _take(self, name: str, tensor: Tensor, pieces: dict[tuple[str, int], Tensor] | None) -> None:
        """Hold a tensor; note its changes in `pieces`."""
        new = tensor.detach().cpu().contiguous()
        if pieces is not None:
            pieces |= {(name, start): piece for start, piece in differences(self._held[name], new)}
        if name in self._held:
            self._held[name].copy_(new)
        else:
            self._held[name] = new.clone()
