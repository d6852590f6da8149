"""The trainer's end of the weight update group; imported by trainer ranks only."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch.distributed import Backend, PrefixStore, ProcessGroup, TCPStore, broadcast, destroy_process_group
from torch.distributed.distributed_c10d import _new_process_group_helper, _set_pg_timeout, _world

from areal_like.backends.ray.workers import is_cancelled
from areal_like.backends.transports.buckets import Buckets
from areal_like.backends.transports.collective.giving_up import wait_for
from areal_like.core.trainer.engine import TrainEngine
from areal_like.runtime.ports import listen, stop_listening

FORMING = timedelta(seconds=30)  # that gloo waits for every rank; one that died never comes


class CollectiveSender(Buckets):
    """Rank 0 of the process group through which servers receive buckets (`Server.receive`).

    The trainer's other ranks gather with it.
    """

    def __init__(self, engine: TrainEngine, rank: int, address: str) -> None:
        super().__init__(engine, rank)
        self._address = address
        self._store: TCPStore | None = None
        self._group: ProcessGroup | None = None

    def open(self, world_size: int, group: str, timeout_s: float) -> tuple[str, int] | None:
        """Listen on this rank's address, and on no other, for the servers; returns address and port."""
        if self._rank:
            return None
        listener = listen(self._address)
        port, self._listening = listener.getsockname()[1], listener.detach()
        self._timeout = timedelta(seconds=timeout_s)
        self._world_size, self._group_name = world_size, group
        self._store = TCPStore(
            self._address,
            port,
            world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=self._listening,
        )
        return self._address, port

    def join(self, backend: str) -> None:
        """Join as rank 0, as SGLang's `init_custom_process_group` joins the others; raises where they stay away."""
        if self._rank:
            return
        group: ProcessGroup
        self._backend = backend
        limit, failure = min(self._timeout, FORMING), ""
        try:
            with _unbound_trainer_group():
                group, _ = _new_process_group_helper(
                    self._world_size,
                    0,
                    [],
                    Backend(backend),
                    PrefixStore(self._group_name, self._store),
                    group_name=self._group_name,
                    timeout=limit,
                )
        except RuntimeError as error:
            failure = str(error)
        if failure:  # here no frame holds the store any more: the ranks that joined and wait for others are released
            self._store = None
            raise RuntimeError(f"not every server joined the group for weights within {limit}: {failure}")
        if backend == "gloo":  # all ranks are connected; NCCL may open further connections
            stop_listening(self._listening)
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self._world_size)}
        _set_pg_timeout(self._timeout, group)
        self._group = group

    def send(self) -> None:
        """Broadcast the prepared buckets and release them; over gloo until the controller cancels it.

        Raises GivenUp then.
        """
        while self.ready:
            if self._group is None or self._backend != "gloo":
                broadcast(self.ready.popleft(), src=0, group=self._group)
            else:
                work = broadcast(self.ready.popleft(), src=0, group=self._group, async_op=True)
                wait_for(work, self._group, is_cancelled)

    def close(self) -> None:
        """Leave the group, if it was formed."""
        if self._group is not None:
            destroy_process_group(self._group)
        self._group = self._store = None


@contextmanager
def _unbound_trainer_group() -> Iterator[None]:
    """Hide that the trainer's own group is bound to its GPU.

    torch would split the new communicator from that group, which lacks the servers, and wait for them for ever.
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
