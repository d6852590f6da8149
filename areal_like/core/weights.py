"""Weight updates: every server acknowledges version v, or the update fails in time and names the cause.

A transport is a folder of `backends/transports/`: `controller.py` has a WeightSync, `rank.py` its part in ranks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from areal_like.core.errors import ServerError, WeightUpdateError, WorkerError
from areal_like.core.events import span
from areal_like.core.rollout.http import AFTERMATH_S, Deadline
from areal_like.core.rollout.server import Server
from areal_like.core.served_form import Convert, Weights
from areal_like.core.trainer.remote import Trainer
from areal_like.core.transfer import FileSource, Layout

if TYPE_CHECKING:
    from areal_like.core.rollout.pool import ServerPool
    from areal_like.core.trainer.engine import TrainEngine
    from areal_like.core.trainer.remote import Trainer

TRANSPORTS = {  # by `WeightUpdateConfig.transport`: the controller's class, and the class in trainer ranks if they have a part
    "adapters": ("AdapterSync", None),
    "collective": ("CollectiveSync", "CollectiveSender"),
    "deltas": ("DeltaSync", "DeltaSender"),
    "disk": ("DiskSync", None),
    "ipc": ("IpcSync", "IpcSender"),
}
MARGIN_S = 2 * AFTERMATH_S + 2  # the limits of single steps, which name the late server, fire first


class WeightSync(Protocol):
    """A weight transport from the trainer to every server."""

    async def connect(self) -> None:
        """Prepare resources that several updates use."""

    async def send(self, version: int, deadline: Deadline) -> None:
        """Send the trainer's current weights as `version` to every server, which acknowledges them.

        One attempt lasts until the deadline, and each further attempt renews it.
        """


@dataclass(frozen=True)
class SyncSpec:
    """Settings of a transport.

    `directory` is shared by all hosts and ends with the run; `backend` serves collective calls between trainer and
    servers, `bucket_mb` is the size of one, and `prefetch_mb` the size that the trainer gathers before servers pause.
    `exporters` are the trainer's ranks on the GPUs of each of the layout's servers; without them every rank exports.
    `full_every` is the number of versions from one full copy to the next, between which there are deltas. With a
    `source` servers download the files that are written to `directory`. `adapters` has trainers of several adapters, by
    name.
    """

    timeout_s: float
    directory: Path
    ranks_per_server: int
    backend: Literal["gloo", "nccl"]
    bucket_mb: int
    prefetch_mb: int = 0
    exporters: Sequence[Collection[int]] = ()
    full_every: int = 1
    source: FileSource | None = None
    adapters: Mapping[str, Trainer] = field(default_factory=dict)

    def ahead(self, buckets: Sequence[Sequence[TensorSpec]]) -> int:
        """Return how many of the first buckets are gathered before the servers pause; at least one."""
        sizes = accumulate(sum(tensor.nbytes for tensor in bucket) for bucket in buckets)
        return max(1, sum(size <= self.prefetch_mb << 20 for size in sizes))


def make_sync(transport: str, trainer: Trainer, pool: ServerPool, spec: SyncSpec) -> WeightSync:
    """Return the controller's side of a transport."""
    module = import_module(f"areal_like.backends.transports.{transport}.controller")
    return getattr(module, TRANSPORTS[transport][0])(trainer, pool, spec)


@dataclass(frozen=True)
class Converted:
    """The weights of an engine in another form, for senders."""

    engine: TrainEngine
    convert: Convert

    def weights(self) -> Weights:
        """Yield the converted weights on every rank."""
        return self.convert(self.engine.weights())


def make_sender(transport: str, engine: TrainEngine, rank: int, address: str, convert: Convert | None = None) -> Any:
    """Return a trainer rank's side of the transport, whose methods `Trainer.transfer` calls, or None if it has none.

    The servers get the weights as `convert` makes them.
    """
    name = TRANSPORTS[transport][1]
    sent = engine if convert is None else Converted(engine, convert)
    return name and getattr(import_module(f"areal_like.backends.transports.{transport}.rank"), name)(
        sent, rank, address
    )


@dataclass(frozen=True)
class TensorSpec:
    """A Hugging Face tensor that the trainer sends; `dtype` as torch spells it without `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def layout(bucket: Sequence[TensorSpec]) -> Layout:
    """Return a bucket's layout as servers read it."""
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in bucket]


async def publish(sync: WeightSync, version: int, timeout_s: float) -> None:
    """Send the weights within `timeout_s`; raise WeightUpdateError if a server did not receive all of them."""
    async with time_limit(f"weight update to version {version}", timeout_s) as deadline:
        with span("weights", "update", version=version):
            await sync.send(version, deadline)


async def with_those_left(pool: ServerPool, deadline: Deadline, send: Callable[[], Awaitable[None]]) -> None:
    """Send weights, and send them again from the start if a server left meanwhile, for instance because it died.

    The others then hold a mixture of weights, so all weights are sent again while they still pause, with a renewed
    deadline.
    """
    while True:
        servers = pool.servers
        try:
            return await send()
        except (ServerError, WorkerError):
            if not pool.servers or all(server in pool.servers for server in servers):
                raise
            deadline.renew()


class Limit(Deadline):
    """A deadline of several steps; the body around them ends MARGIN_S later."""

    def __init__(self, seconds: float, body: asyncio.Timeout) -> None:
        self._body = body
        super().__init__(seconds)

    def renew(self) -> None:
        super().renew()
        self._body.reschedule(asyncio.get_running_loop().time() + self.seconds + MARGIN_S)


@asynccontextmanager
async def time_limit(what: str, timeout_s: float) -> AsyncIterator[Deadline]:
    """End the body at its time limit, and raise its failures as WeightUpdateError that names `what`; yield the
    limit."""
    try:
        async with asyncio.timeout(None) as body:
            yield Limit(timeout_s, body)
    except TimeoutError:
        raise WeightUpdateError(
            f"{what} failed: the trainer did not finish within {timeout_s:g} s. Raise weight_update.timeout_s if the model "
            "is that large"
        ) from None
    except ServerError as error:
        raise WeightUpdateError(f"{what} failed: {error}") from error


@asynccontextmanager
async def compare_checksums(trainer: Trainer, servers: Sequence[Server], deadline: Deadline) -> AsyncIterator[None]:
    """Compare the tensors that servers receive in the body with the trainer's; raise ServerError if one differs."""
    await asyncio.gather(*(server.watch_checksums(deadline.left) for server in servers))
    yield
    expected = json.dumps(await trainer.checksums(timeout_s=deadline.left))
    await asyncio.gather(*(server.compare_checksums(expected, deadline.left) for server in servers))
