"""One trainer rank as a Ray actor: an engine, and this rank's end of the weight transport.

The controller imports this to start actors, so torch is imported inside the methods only.
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from socket import socket
from typing import Any

from areal_like.backends.ray.lifetime import gloo_on_loopback
from areal_like.backends.ray.ray_cluster import LOOPBACK
from areal_like.backends.training.environment import apply_environment
from areal_like.core.gc_tuning import pause_gc
from areal_like.core.trainer.engine import EngineSpec, Rendezvous, TrainEngine
from areal_like.runtime.ports import listen

_TRAINERS = ("megatron", "fsdp")  # folders with an `engine.py`
type MakeSender = Callable[[TrainEngine, int, str], Any]  # of the engine, its rank and the rank's own address


class TrainerRank:
    """A rank of a trainer, called by `areal_like.core.trainer.remote.Trainer`; `address` is the rank's own."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self._rank, self._world_size, self._address = rank, world_size, address
        self._listener: socket | None = None

    def listen(self, address: str) -> tuple[str, int]:
        """Open the socket of the ranks' rendezvous; return its address and port. Rank 0 only."""
        self._listener = listen(address)
        return address, self._listener.getsockname()[1]

    def build(self, address: str, port: int, timeout_s: float, spec: EngineSpec, make_sender: MakeSender) -> None:
        """Join the other ranks and build the engine. Raises ValueError for an unknown backend.

        Ranks on one host use its loopback address, and their gloo groups listen only there.
        """
        rendezvous = Rendezvous(self._rank, self._world_size, address, port, timeout_s, self._listener)
        with gloo_on_loopback() if address == LOOPBACK else nullcontext():
            self._engine = make_engine(spec, rendezvous)
        self._sender = make_sender(self._engine, self._rank, self._address)

    def is_there(self) -> None:
        """Return immediately, which shows that the process is alive and idle."""

    def engine(self, method: str, *arguments: Any) -> Any:
        """Call one method of the engine."""
        return getattr(self._engine, method)(*arguments)

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with the engine and arguments."""
        return function(self._engine, *arguments)

    def use_adapter(self, adapter: str, method: str, *arguments: Any) -> Any:
        """Call one method of the engine while it uses an adapter."""
        self._engine.select(adapter)
        return self.engine(method, *arguments)

    def checksums(self) -> dict[str, int]:
        """Return the checksum of each weight under its Hugging Face name.

        The first call gathers the weights on every rank; later calls use the weights that the sender gathers.
        """
        from areal_like.backends.transports.checksum import checksum, numbers

        if self._sender is None:
            return numbers({name: checksum(tensor) for name, tensor in self._engine.weights()})
        if self._sender.sums is None:
            self._sender.sums = {name: checksum(tensor) for name, tensor in self._engine.weights()}
        return numbers(self._sender.sums)

    def transfer(self, step: str, *arguments: Any) -> Any:
        """Run one step of the transport's sender."""
        return getattr(self._sender, step)(*arguments)


def make_engine(spec: EngineSpec, rendezvous: Rendezvous) -> TrainEngine:
    """Return the engine of a backend's folder, in this process's environment. Raises ValueError for an unknown one."""
    apply_environment(spec, rendezvous.address)
    if spec.backend not in _TRAINERS:
        raise ValueError(f"the backend {spec.backend} has no trainer; use {' or '.join(_TRAINERS)}")
    with pause_gc():
        module = import_module(f"areal_like.backends.{spec.backend}.engine")
    engine: TrainEngine = module.ENGINE(spec, rendezvous)
    return engine
