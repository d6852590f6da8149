"""The processes of one run, from the first to the last: `async with run_cluster(...) as cluster`."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.cluster.lifetime import run_lifetime, run_variables
from areal_like.cluster.placement import Placement, place
from areal_like.cluster.ray_cluster import ray_cluster
from areal_like.cluster.workers import Member, WorkerGroup, worker_class
from areal_like.config.schema import SchedulerConfig

if TYPE_CHECKING:
    from allocation import Device


SIGTERM_REASON = "SIGTERM"


@dataclass(frozen=True)
class Rank:
    """What a member of a new group may want to know; `port` is free on rank 0's `master`, for a rendezvous."""

    rank: int
    world_size: int
    host: str
    master: str
    port: int


@dataclass
class Cluster:
    """A running cluster and the groups that were started on it."""

    run_id: str
    token: str
    tmp_dir: Path
    log_dir: Path
    local: bool
    placement: Placement
    startup_timeout_s: float
    groups: list[WorkerGroup] = field(default_factory=list)

    def host(self, device: Device) -> str:
        """Address of the node that a plan device is on."""
        return self.placement.slots[device].host

    async def start_group(
        self,
        role: str,
        cls: type,
        devices: Sequence[Sequence[Device]],
        arguments: Callable[[Rank], Mapping[str, Any]],
        *,
        call_timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> WorkerGroup:
        """Start one process for each entry of `devices`, which sees those GPUs alone, and make `cls(**arguments(rank))` there.

        `env` is set before `cls` is imported. Output goes to `log_dir/ROLE-RANK.log`. Raises WorkerError if a member
        fails or all are not there within the scheduler's start-up limit.
        """
        members = [self._start_worker(role, rank, cls, own, env or {}) for rank, own in enumerate(devices)]
        group = WorkerGroup(role, members, call_timeout_s)
        self.groups.append(group)
        port = await group.free_port(0, self.startup_timeout_s)
        ranks = [Rank(member.rank, len(members), member.host, members[0].host, port) for member in members]
        await group.build(cls, [arguments(rank) for rank in ranks], self.startup_timeout_s)
        return group

    def _start_worker(
        self, role: str, rank: int, cls: type, devices: Sequence[Device], env: Mapping[str, str]
    ) -> Member:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        slots = [self.placement.slots[device] for device in devices]
        gpus = ",".join(slot.gpu for slot in slots if slot.gpu is not None)
        variables = {**run_variables(self.run_id), "CUDA_VISIBLE_DEVICES": gpus}
        if self.local:
            variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        log_file = (self.log_dir / f"{role}-{rank}.log").absolute()
        strategy = PlacementGroupSchedulingStrategy(self.placement.group, placement_group_bundle_index=slots[0].bundle)
        remote = ray.remote(worker_class(cls)).options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy)
        return Member(rank, slots[0].host, remote.remote({**variables, **env}, log_file), log_file)


@asynccontextmanager
async def run_cluster(
    scheduler: SchedulerConfig, devices: Collection[Device], *, uses_gpus: bool, log_dir: Path
) -> AsyncIterator[Cluster]:
    """Connect to Ray, reserve the plan's devices, and end everything when the block or this process ends.

    SIGTERM cancels the block and exits with 143, as Ctrl-C does under `asyncio.run` with KeyboardInterrupt.
    Raises ClusterError if there is no cluster or not enough in it.
    """
    run_id = secrets.token_hex(6)
    local = scheduler.type == "local"
    with (
        run_lifetime(run_id) as tmp_dir,
        ray_cluster(scheduler, n_slots=len(set(devices)), uses_gpus=uses_gpus, directory=tmp_dir),
        _sigterm_cancels(),
    ):
        timeout_s = scheduler.startup_timeout_s
        placement = await place(devices, uses_gpus=uses_gpus, elastic=not local, timeout_s=timeout_s)
        cluster = Cluster(run_id, secrets.token_hex(32), tmp_dir, log_dir, local, placement, timeout_s)
        try:
            yield cluster
        finally:
            for group in cluster.groups:
                group.kill()
            _remove(placement)


def _remove(placement: Placement) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(placement.group)


@contextmanager
def _sigterm_cancels() -> Iterator[None]:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel, SIGTERM_REASON)
    try:
        yield
    except asyncio.CancelledError as cancelled:
        if cancelled.args == (SIGTERM_REASON,):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
