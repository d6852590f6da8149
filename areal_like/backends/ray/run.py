"""The processes of one run, from the first to the last: `async with run_cluster(...) as cluster`."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.backends.ray.head import BEAT_S, CLOSE_S, head_answers, head_url, head_watched
from areal_like.backends.ray.heartbeat import accepts
from areal_like.backends.ray.interfaces import use_interface
from areal_like.backends.ray.lifetime import JANITOR_LIMIT_S, Caretaker, run_lifetime
from areal_like.backends.ray.nodes import check_nodes
from areal_like.backends.ray.placement import (
    Placement,
    moved_slots,
    node_lives,
    node_of,
    node_urls,
    on_bundle,
    place,
    ray_errors,
)
from areal_like.backends.ray.ray_cluster import ray_cluster_of_run
from areal_like.backends.ray.sent_files import send_missing
from areal_like.backends.ray.shared_files import NOTHING_SHARED, FileSharing, check_shared
from areal_like.backends.ray.workers import WorkerGroup, WorkerHandle, worker_class
from areal_like.core.config.schema import SchedulerConfig
from areal_like.core.errors import ClusterError, RunError, WorkerError
from areal_like.core.signals import signals_cancel

if TYPE_CHECKING:
    from allocation.plan import Device, Plan


ANSWER_S = 30.0  # for a node to read the end of a file


async def add_outputs(error: BaseException, caretakers: WorkerGroup) -> None:
    """Add the last output lines of each failed process to its error, read on the process's node."""
    for failure in _failures(error):
        if not failure.log_file.exists():
            found = await asyncio.gather(
                *(_last_lines(caretakers.only(rank), failure) for rank, _ in enumerate(caretakers.members))
            )
            for note in filter(None, found):
                failure.add_note(note)


async def _last_lines(caretaker: WorkerGroup, failure: WorkerError) -> str:
    with suppress(WorkerError):  # the node is lost
        lines = await caretaker.call_one(0, "last_lines", failure.log_file, phase="reading output", timeout=ANSWER_S)
        if lines:
            return f"the end of {failure.log_file} on host {caretaker.members[0].host}:\n  " + "\n  ".join(lines)
    return ""


def _failures(error: BaseException) -> Iterator[WorkerError]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _failures(each)
    elif isinstance(error, WorkerError):
        yield error


NODE_ANSWER_S = 2.0  # until a node that does not answer is left out


@dataclass
class RunCluster:
    """A running cluster and the groups started on it.

    `token` is the run's secret for its servers; `shared_dir`, visible on every host, is removed with the run. With
    `caretakers` the processes of each node have their own run id, so that nodes end independently.
    """

    run_id: str
    shared_dir: Path
    log_dir: Path
    placement: Placement
    startup_timeout_s: float
    cache_dir: str | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    groups: list[WorkerGroup] = field(default_factory=list)
    caretakers: bool = False
    moved: dict[int, str] = field(default_factory=dict)  # node ids of bundles moved by Ray
    ports: str | None = None  # range that the processes choose from
    interface: str | None = None  # or network, of each node's listening address
    sharing: FileSharing = NOTHING_SHARED
    warn: Callable[[str], object] = lambda text: None
    apart: set[str] = field(default_factory=set)  # hosts that cannot read the controller's files
    nodes: list[WorkerGroup] = field(default_factory=list)  # caretakers of all parts of the run

    async def prepare(self, placement: Placement) -> Placement:
        """Return a placement on nodes of an existing cluster with the addresses at which their processes listen.

        Nodes that do not share the run's files receive its models. Raises ClusterError if they must share the files.
        """
        if apart := set(await check_shared(placement, self.log_dir, self.sharing)):
            await send_missing(placement, self.sharing.models)
            self.warn(
                f"cluster.fileroot is not shared by this host and {', '.join(sorted(apart))}. Files of processes "
                f"there stay there: output in {self.log_dir}, and checkpoints of the model if actor rank 0 is one of them"
            )
        self.apart |= apart
        return await use_interface(placement, self.interface)

    def node_id(self, bundle: int) -> str:
        """Return the id of the run's processes on the node of a bundle."""
        return self.moved.get(bundle, f"{self.run_id}-{bundle}") if self.caretakers else self.run_id

    async def start_group(
        self,
        role: str,
        cls: type,
        devices: Sequence[Sequence[Device]],
        arguments: Callable[[int, str], Mapping[str, Any]],
        *,
        call_timeout_s: float,
        first_rank: int = 0,
    ) -> WorkerGroup:
        """Start one process for each entry of `devices` and create `cls(**arguments(rank, host))` there.

        A process sees only the GPUs of its entry; `host` is its node's address, and output goes to
        `log_dir/ROLE-RANK.log`. Raises WorkerError if a member fails or exceeds the scheduler's start-up limit.
        """
        import ray

        actor = ray.remote(worker_class(cls))
        workers = [self._start_worker(role, rank, actor, own) for rank, own in enumerate(devices, first_rank)]
        group = WorkerGroup(role, workers, call_timeout_s)
        self.groups.append(group)
        try:
            await group.build(cls, [arguments(member.rank, member.host) for member in workers], self.startup_timeout_s)
        except BaseException:
            self.end_group(group)
            raise
        return group

    def end_group(self, group: WorkerGroup) -> None:
        """Stop the processes of one group."""
        self.groups.remove(group)
        group.kill()

    async def lives(self, devices: Sequence[Device]) -> bool:
        """Return whether Ray considers the node of these devices alive."""
        return await node_lives(self.placement.slots[devices[0]].node_id)

    async def beats(self, groups: Sequence[WorkerGroup]) -> dict[str, str]:
        """Return a URL for each host of the groups; it accepts connections while the host is in the cluster."""
        hosts, urls = {member.host for group in groups for member in group.members}, await node_urls()
        slots = [slot for slot in self.placement.slots.values() if slot.host in hosts and slot.node_id in urls]
        return {slot.host: urls[slot.node_id] for slot in slots}

    async def locate(self, device: Device) -> tuple[str, str] | None:
        """Return id and URL of the node that now has a device, None if there is none."""
        with ray_errors():
            node = await asyncio.to_thread(node_of, self.placement.group, self.placement.slots[device].bundle)
            urls = await node_urls()
        return (node[0], urls[node[0]]) if node and node[0] in urls else None

    async def follow(self, devices: Sequence[Device], *, uses_gpus: bool) -> None:
        """Use the node to which Ray has moved devices of a lost node, for processes that start later.

        Raises ClusterError if the node cannot read the run's files.
        """
        moved = await moved_slots(self.placement, devices, uses_gpus=uses_gpus)
        slots = (await self.prepare(replace(self.placement, slots=moved))).slots
        self.placement = replace(self.placement, slots={**self.placement.slots, **slots})
        bundle = slots[devices[0]].bundle
        self.moved[bundle] = f"{self.run_id}-{bundle}-{secrets.token_hex(2)}"
        arguments = {"run_id": self.node_id(bundle), "shared_dir": self.shared_dir, "keepers": await keepers()}
        caretaker = await self.start_group(
            "node",
            Caretaker,
            [devices[:1]],
            lambda rank, host: arguments,
            call_timeout_s=JANITOR_LIMIT_S,
            first_rank=bundle,
        )
        self.nodes.append(caretaker)

    async def on_nodes(self, function: Callable[[list[int]], Any]) -> list[Any]:
        """Return `function` of the ids of the run's Ray workers, from each node of an existing cluster that answers."""

        async def ask(node: WorkerGroup) -> list[Any]:
            with suppress(WorkerError, TimeoutError):  # lost, or about to be
                async with asyncio.timeout(NODE_ANSWER_S):
                    return [await node.call_one(0, "apply", function, phase="look", timeout=math.inf)]
            return []

        members = [group.only(place) for group in self.nodes for place in range(len(group.members))]
        return [answer for found in await asyncio.gather(*map(ask, members)) for answer in found]

    def using(self, devices: Mapping[Device, Device]) -> RunCluster:
        """Return the same cluster for another plan, each of whose devices uses the slot of one of this plan's."""
        slots = {device: self.placement.slots[own] for device, own in devices.items()}
        return replace(self, placement=replace(self.placement, slots=slots))

    @asynccontextmanager
    async def relocate(
        self, devices: Sequence[Device], plan: Plan, *, uses_gpus: bool, say: Callable[[str], None] | None = None
    ) -> AsyncIterator[tuple[RunCluster, Sequence[Device]]]:
        """Yield replacements for devices on a lost node, with their names there, as soon as there are any.

        Ray moves a lost node's whole reservation to another node with enough capacity. If there is none, there may be
        capacity for `plan`, which requests as many devices as `devices`.
        """
        async with AsyncExitStack() as held:
            smaller = place(plan, uses_gpus=uses_gpus, elastic=True, timeout_s=math.inf, say=say)
            elsewhere = asyncio.create_task(held.enter_async_context(smaller))
            whole = asyncio.create_task(moved_slots(self.placement, devices, uses_gpus=uses_gpus))
            try:
                await asyncio.wait((elsewhere, whole), return_when=asyncio.FIRST_COMPLETED)
                if whole.done():
                    placement, there = Placement(self.placement.group, whole.result()), devices
                else:
                    placement, there = elsewhere.result(), plan.devices
            finally:
                await cancel_all(elsewhere, whole)
            if placement.group is self.placement.group:
                await held.aclose()  # in case the smaller plan was granted at the same time
            async with self._part(placement) as cluster:
                yield cluster, there

    @asynccontextmanager
    async def _part(self, placement: Placement) -> AsyncIterator[RunCluster]:
        """Open a part of the run with a clean-up of its own."""
        part = secrets.token_hex(6)
        cluster = replace(
            self, run_id=part, shared_dir=self.shared_dir / part, groups=[], sharing=replace(self.sharing, devices={})
        )
        cluster.placement = await cluster.prepare(placement)
        async with _caretakers(cluster):
            yield cluster

    def _start_worker(self, role: str, rank: int, actor: Any, devices: Sequence[Device]) -> WorkerHandle:
        slots = [self.placement.slots[device] for device in devices]
        if len({slot.bundle for slot in slots}) != 1:
            raise ClusterError(
                f"{role} {rank} spans several nodes of the plan; one process needs all of its GPUs on one"
            )
        gpus = ",".join(slot.gpu for slot in slots if slot.gpu is not None)
        log_file = (self.log_dir / f"{role}-{rank}.log").absolute()
        actor = on_bundle(actor, self.placement.group, slots[0].bundle, max_restarts=0)
        host, run_id = slots[0].host, self.node_id(slots[0].bundle)
        worker = actor.remote(run_id, host, gpus, log_file, self.cache_dir, self.ports)
        return WorkerHandle(rank, host, worker, log_file)


@asynccontextmanager
async def run_cluster(
    scheduler: SchedulerConfig,
    plan: Plan,
    *,
    uses_gpus: bool,
    log_dir: Path,
    shared_dir: Path,
    lock: int | None = None,
    files: Mapping[str, Path] | None = None,
    warn: Callable[[str], object] = lambda text: None,
    ports: str | None = None,
    interface: str | None = None,
    sharing: FileSharing = NOTHING_SHARED,
) -> AsyncIterator[RunCluster]:
    """Connect to Ray, reserve the plan's devices, and end everything when the block or this process ends.

    `shared_dir` is removed then; its writers create it in a place that the hosts of `sharing` can read. The descriptor
    `lock` stays open until the clean-up is done. Every node reads `files`, by their keys; `warn` receives differences
    between nodes. Processes use free ports from the range `ports`, at each node's address of `interface` on an existing
    cluster. Ctrl-C and SIGTERM cancel the block, which then raises KeyboardInterrupt or exits with 143. Raises
    ClusterError if the cluster is missing or too small, or if a node cannot read `log_dir` but must.
    """
    run_id, shared_dir = secrets.token_hex(6), shared_dir.absolute()
    local = scheduler.type == "local"
    limit_s = scheduler.startup_timeout_s
    with run_lifetime(run_id, shared_dir, lock=lock, ports=ports) as directory, signals_cancel():
        slots = len(plan.devices)
        async with (
            ray_cluster_of_run(scheduler, n_slots=slots, uses_gpus=uses_gpus, directory=directory, log_dir=log_dir),
            place(plan, uses_gpus=uses_gpus, elastic=not local, timeout_s=limit_s) as placement,
        ):
            cluster = RunCluster(
                *(run_id, shared_dir, log_dir, placement, limit_s, scheduler.cache_dir),
                ports=ports,
                interface=interface,
                sharing=sharing,
                warn=warn,
            )
            if not local:
                cluster.placement = await cluster.prepare(placement)
                await check_nodes(cluster.placement, files or {}, warn, ports, interface)
            # a private cluster ends as a whole and may be dead already
            async with (
                nullcontext() if local else _caretakers(cluster),
                nullcontext() if local else head_watched(head_url()),
            ):
                yield cluster


@asynccontextmanager
async def _caretakers(cluster: RunCluster) -> AsyncIterator[None]:
    """Hold the run's lifetime on every node of the plan, and end its groups; `run_lifetime` covers only this host."""
    cluster.caretakers = True
    one_each = {slot.bundle: device for device, slot in cluster.placement.slots.items()}
    shared = {"shared_dir": cluster.shared_dir, "keepers": await keepers()}
    bundles = list(one_each)
    try:
        caretakers = await cluster.start_group(
            "node",
            Caretaker,
            [(device,) for device in one_each.values()],
            lambda rank, host: {"run_id": cluster.node_id(bundles[rank]), **shared},
            call_timeout_s=JANITOR_LIMIT_S,
        )
        cluster.nodes.append(caretakers)
        try:
            yield
        except (RunError, ExceptionGroup) as error:
            if cluster.apart:
                await add_outputs(error, caretakers)
            raise
        finally:
            cluster.nodes.remove(caretakers)
            for group in cluster.groups[1:]:
                group.kill()
            await _close(cluster, caretakers)
    finally:
        for group in cluster.groups:
            group.kill()


async def _close(cluster: RunCluster, caretakers: WorkerGroup) -> None:
    """Ask the caretakers of all reachable nodes to clean up; a node that was cut off does so when Ray ends there."""
    headed = await head_answers()
    urls = await cluster.beats([caretakers]) if headed else {}

    async def close(place: int) -> None:
        node, host = caretakers.only(place), caretakers.members[place].host
        with suppress(WorkerError):  # a lost node has lost its caretaker
            if not headed:  # Ray would not end it
                await node.call_one(0, "close_and_exit", phase="clean-up", timeout=CLOSE_S)
            elif host in urls and await accepts(urls[host], BEAT_S):
                await node.call_one(0, "close", phase="clean-up")

    await asyncio.gather(*map(close, range(len(caretakers.members))))


async def keepers() -> list[str]:
    """Return the URLs of Ray's head and of the controller's Ray process: nodes that lose them end the run."""
    import ray

    return [head_url(), (await node_urls())[ray.get_runtime_context().get_node_id()]]


async def cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
