"""The trainer's side of weights by full copies and deltas; imported by trainer ranks only."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from areal_like.backends.transports.checksum import checksum
from areal_like.backends.transports.deltas.files import differences, write_delta, write_full
from areal_like.core.trainer.engine import TrainEngine
from areal_like.core.transfer import WeightFile


@dataclass(frozen=True)
class Written:
    """The files of one version, a delta or a full copy or both, and the size of the weights in bytes."""

    delta: WeightFile | None
    full: WeightFile | None
    weights: int


class DeltaSender:
    """Gathers the weights on every rank; rank 0 keeps them in host memory, and writes the changes since."""

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        self._engine, self._rank = engine, rank
        self._held: dict[str, Tensor] = {}
        self._last: str | None = None  # name of the version that is held
        self.sums: dict[str, Tensor] | None = None  # checksums of the gathered weights, once requested

    def write(self, path: Path, after: str | None, is_full: bool) -> Written | None:
        """Write the weights as a delta to the version `after`, if that is held, and as a full copy if asked or if not.

        The names of the files begin with `path`, whose last part names the version.
        """
        has_delta, self._last = after is not None and after == self._last, None
        pieces: dict[tuple[str, int], Tensor] = {}
        for name, tensor in self._engine.weights():
            if self.sums is not None:
                self.sums[name] = checksum(tensor)
            if self._rank == 0:
                self._take(name, tensor, pieces if has_delta else None)
        if self._rank:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        delta = full = None
        if has_delta:
            file = path.with_name(f"{path.name}.delta.safetensors")
            delta = WeightFile(str(file), write_delta(file, pieces), file.stat().st_size)
        if is_full or not has_delta:
            file = path.with_name(f"{path.name}.safetensors")
            full = WeightFile(str(file), write_full(file, self._held), file.stat().st_size)
        self._last = path.name
        return Written(delta, full, sum(tensor.nbytes for tensor in self._held.values()))

    def _take(self, name: str, tensor: Tensor, pieces: dict[tuple[str, int], Tensor] | None) -> None:
        """Hold a tensor; note its changes in `pieces`."""
        new = tensor.detach().cpu().contiguous()
        if pieces is not None:
            pieces |= {(name, start): piece for start, piece in differences(self._held[name], new)}
        if name in self._held:
            self._held[name].copy_(new)
        else:
            self._held[name] = new.clone()
