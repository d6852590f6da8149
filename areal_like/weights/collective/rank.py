"""The trainer's end of the weight update group; imported by trainer ranks only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Backend, PrefixStore, ProcessGroup, TCPStore, broadcast
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from areal_like.cluster.lifetime import listen
from areal_like.trainer.remote import TensorSpec

Bucket = list[tuple[str, Tensor]]


class Broadcaster:
    """Rank 0 of the process group through which SGLang's `/update_weights_from_distributed` receives."""

    def open_store(self, address: str, world_size: int, group: str, timeout_s: float) -> tuple[str, int]:
        """Listen on `address`, and on no other, for the servers; returns address and port."""
        listener = listen(address)
        port = listener.getsockname()[1]
        self._timeout = timedelta(seconds=timeout_s)
        self._world_size, self._group_name = world_size, group
        self._store = TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return address, port

    def join(self, backend: str) -> None:
        """Join as rank 0, as SGLang's `init_custom_process_group` joins the others; raises where they stay away."""
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

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Broadcast each bucket as one flat tensor of bytes, SGLang's `flattened_bucket` format."""
        for bucket in buckets:
            flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket])
            broadcast(flat, src=0, group=self._group)


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


def specs(buckets: Iterable[Bucket]) -> list[list[TensorSpec]]:
    """Names, data types and shapes of what `send` would send."""
    return [
        [TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in bucket]
        for bucket in buckets
    ]
