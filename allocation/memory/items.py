"""Uses of GPU memory: items, phases of an engine, and the total of engines that share a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allocation.notebook import render_html
from allocation.settings import MegatronSettings

# Bytes beside the tensors. CUDA's context, and the libraries' kernels; cuBLAS and cuDNN workspaces, which the allocator
# allocates; NCCL's buffers for each communicator with several ranks; SGLang's CUDA graphs and prefill.
CONTEXT = 600 << 20
WORKSPACE = 100 << 20
COMMUNICATOR = 100 << 20
GRAPHS = 2 << 30
# Reserved by torch's allocator beyond the peak of allocated memory.
FRAGMENTATION = 0.03
CUDA, NCCL, RESERVE = "CUDA and libraries", "NCCL", "allocator's reserve"
CAPTURED = "CUDA graphs and prefill"
CACHE = "KV cache"
AT_REST, UPDATE = "at rest", "weight update"
TRAINED = ("gradients", "main weights", "Adam's moments")  # first words of items that only training needs


@dataclass(frozen=True, slots=True)
class Item:
    """One use of GPU memory."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """The contents of a GPU at the peak of a phase."""

    name: str
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def largest(self) -> Item:
        return max(self.items, key=lambda item: item.bytes)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The phases of one engine.

    `stage` is the pipeline stage that needs the most memory. `kv_tokens` is the capacity of a server's KV cache, if the
    size of the GPU is known; `kv_token_bytes` is the size of one token.
    """

    role: str
    phases: tuple[Phase, ...]
    stage: int = 0
    kv_token_bytes: int = 0
    kv_tokens: int | None = None

    @property
    def is_server(self) -> bool:
        return any(phase.name == "rollout" for phase in self.phases)

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def idle(self) -> int:
        """Bytes that stay while other engines on the same GPUs work; a server never releases memory."""
        names = (AT_REST, "rollout", "load")
        return next(phase.bytes for name in names for phase in self.phases if phase.name == name)

    @property
    def fixed(self) -> int:
        """Bytes that stay on the GPU even during the time slice of another engine."""
        return sum(item.bytes for item in self.peak.items if item.name in (CUDA, NCCL, CAPTURED))

    def phase(self, name: str) -> Phase:
        """Return the phase called `name`. Raises `StopIteration` if the engine does not have it."""
        return next(phase for phase in self.phases if phase.name == name)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The footprints of all engines of a plan, for display and for JSON; `host` has name and bytes by node."""

    title: str
    gpu_bytes: int | None
    footprints: tuple[Footprint, ...]
    host: Mapping[int, Sequence[tuple[str, int]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return bytes of every item, by engine and phase."""
        engines = {
            one.role: {
                "stage": one.stage,
                "peak": {"phase": one.peak.name, "bytes": one.peak.bytes},
                "phases": {phase.name: {item.name: item.bytes for item in phase.items} for phase in one.phases},
                "kv_tokens": one.kv_tokens,
                "kv_token_bytes": one.kv_token_bytes,
            }
            for one in self.footprints
        }
        host = {str(node): dict(items) for node, items in self.host.items()}
        return {"allocation": self.title, "gpu_bytes": self.gpu_bytes, "engines": engines, "host": host}

    def _repr_html_(self) -> str:
        return render_html(self)


# The setting that offloads an item, by the first word of its name.
_OFFLOADED_BY = {
    "weights": "param_offload",
    "gradients": "grad_offload",
    "main": "optimizer_offload",
    "Adam's": "optimizer_offload",
}


def staying(static: Sequence[Item], settings: MegatronSettings, *needed: str) -> list[Item]:
    """Return the items on the GPU in a phase that needs some of them: the others stay too, unless they are
    offloaded."""
    words = [(item, item.name.partition(" ")[0]) for item in static]
    return [
        item
        for item, word in words
        if word in needed or not (settings.offload or getattr(settings, _OFFLOADED_BY[word]))
    ]


def with_reserve(named: Mapping[str, Sequence[Item]], beside: Sequence[Item]) -> list[Phase]:
    """Return phases with memory outside of tensors, and the part of the GPU that torch's allocator cannot use."""
    phases = []
    for name, items in named.items():
        reserve = Item(RESERVE, int(FRAGMENTATION * sum(item.bytes for item in items)))
        phases.append(Phase(name, tuple(item for item in (*items, reserve, *beside) if item.bytes)))
    return phases


def forward_only(phases: Iterable[Phase]) -> Iterator[Phase]:
    """Yield the phases of a reference model, which has weights but no optimizer."""
    for phase in phases:
        if phase.name in ("load", "log-probs", AT_REST):
            left = (item for item in phase.items if not item.name.startswith((*TRAINED, RESERVE)))
            yield Phase(phase.name, tuple(left))


def shared_peak(prints: Sequence[Footprint], *, offload: bool) -> int:
    """Return the bytes that engines need together on a shared GPU: the worst peak plus the others' idle memory.

    With `offload`, servers and trainers are time-shared; trainers stay together in one time slice, as do servers. New
    weights are sent when gradients and optimizer have left, and the servers have room for weights but not for a cache.
    """
    servers, trainers = ([it for it in prints if it.is_server is kind] for kind in (True, False))
    if not (offload and servers and trainers):
        return _most_together(prints)
    fixed_servers, fixed_trainers = (sum(it.fixed for it in side) for side in (servers, trainers))
    update = sum(map(_weights_alone, trainers)) + sum(_without_cache(it) for it in servers)
    steps = [replace(it, phases=tuple(p for p in it.phases if p.name != UPDATE)) for it in trainers]
    return max(_most_together(servers) + fixed_trainers, _most_together(steps) + fixed_servers, update)


def _most_together(prints: Sequence[Footprint]) -> int:
    """Return the worst peak of an engine plus the idle memory of the others."""
    idle = sum(it.idle for it in prints)
    return max(it.peak.bytes + idle - it.idle for it in prints)


def _weights_alone(one: Footprint) -> int:
    """Return bytes of a trainer during a weight update, without gradients and optimizer."""
    phase = next(phase for name in (UPDATE, AT_REST) for phase in one.phases if phase.name == name)
    beside = sum(item.bytes for item in phase.items if item.name in (CUDA, NCCL))
    left = [it for it in phase.items if it.name not in (CUDA, NCCL, RESERVE) and not it.name.startswith(TRAINED)]
    return beside + int((1 + FRAGMENTATION) * sum(item.bytes for item in left))


def _without_cache(server: Footprint) -> int:
    """Return bytes of a server that has taken its weights back, but not its cache."""
    return sum(item.bytes for item in server.phase(UPDATE).items if item.name != CACHE)
