"""The trainer's end of the weight update group; imported by trainer ranks only."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Backend, PrefixStore, ProcessGroup, TCPStore, broadcast, destroy_process_group
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from areal_like.cluster.lifetime import listen
from areal_like.trainer.engine import TrainEngine
from areal_like.weights.sync import TensorSpec


class CollectiveSender:
    """Rank 0 of the process group through which SGLang's `/update_weights_from_distributed` receives.

    The trainer's other ranks take part in gathering. Beyond the model there is one bucket and one tensor at a time.
    """

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        self._engine, self._rank, self._address = engine, rank, address
        self._buckets: list[list[TensorSpec]] = []
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._flat: Tensor | None = None

    def open(self, world_size: int, group: str, timeout_s: float) -> tuple[str, int] | None:
        """Listen on this rank's address, and on no other, for the servers; returns address and port."""
        if self._rank:
            return None
        listener = listen(self._address)
        port = listener.getsockname()[1]
        self._timeout = timedelta(seconds=timeout_s)
        self._world_size, self._group_name = world_size, group
        self._store = TCPStore(
            self._address,
            port,
            world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return self._address, port

    def join(self, backend: str) -> None:
        """Join as rank 0, as SGLang's `init_custom_process_group` joins the others; raises where they stay away."""
        if self._rank:
            return
        group: ProcessGroup
        with _unbound_trainer_group():
            group, _ = _new_process_group_helper(
                self._world_size,
                0,
                [],
                Backend(backend),
                PrefixStore(self._group_name, self._store),
                group_name=self._group_name,
                timeout=self._timeout,
            )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self._world_size)}
        self._group = group

    def layout(self, bucket_mb: int) -> list[list[TensorSpec]]:
        """Which tensors each bucket will hold: at most `bucket_mb` MiB of them, or one that is larger."""
        self._buckets, room = [], 0
        for name, tensor in self._engine.weights():
            if tensor.nbytes > room:
                self._buckets.append([])
                room = bucket_mb << 20
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._buckets[-1].append(TensorSpec(name, dtype, tuple(tensor.shape), tensor.nbytes))
            room -= tensor.nbytes
            del tensor  # before the next is gathered
        return self._buckets

    def prepare(self, number: int) -> None:
        """Gather a bucket as one flat tensor of bytes, SGLang's `flattened_bucket` format; they come in turn from 0."""
        if number == 0:
            self._weights, self._flat = self._engine.weights(), None
        place = 0
        for spec in self._buckets[number]:
            _, tensor = next(self._weights)
            if self._rank == 0:
                if self._flat is None:
                    size = sum(spec.nbytes for spec in self._buckets[number])
                    self._flat = torch.empty(size, dtype=torch.uint8, device=tensor.device)
                self._flat[place : place + spec.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
            place += spec.nbytes
            del tensor
        if number + 1 == len(self._buckets):
            for _ in self._weights:  # nothing more comes; a generator that waits would hold the last tensor
                pass

    def send(self) -> None:
        """Broadcast what was prepared, and let go of it."""
        if self._flat is not None:
            broadcast(self._flat, src=0, group=self._group)
            self._flat = None

    def close(self) -> None:
        """Leave the group."""
        if self._rank == 0:
            destroy_process_group(self._group)


@contextmanager
def _unbound_trainer_group() -> Iterator[None]:
    """Hide that the trainer's own group is bound to its GPU.

    torch would split the new communicator from that group, in which the servers are not, and wait for them for ever.
    """
    trainer = torch.distributed.group.WORLD
    if trainer is None or trainer.bound_device_id is None:
        yield
        return
    device, trainer.bound_device_id = trainer.bound_device_id, None
    try:
        yield
    finally:
        trainer.bound_device_id = device
