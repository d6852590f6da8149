"""What lies on a GPU: uses of memory, phases of an engine, and what engines that share a GPU need together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allocation.notebook import render_html
from allocation.settings import MegatronSettings

# Bytes beside the tensors. CUDA's context, and the libraries' kernels; cuBLAS and cuDNN workspaces, which the allocator
# gives; NCCL's buffers for each communicator with company; what SGLang's CUDA graphs and prefill take.
CONTEXT = 600 << 20
WORKSPACE = 100 << 20
COMMUNICATOR = 100 << 20
GRAPHS = 2 << 30
# Reserved by torch's allocator beyond what is allocated at the peak.
FRAGMENTATION = 0.03
CUDA, NCCL, RESERVE = "CUDA and libraries", "NCCL", "allocator's reserve"
CAPTURED = "CUDA graphs and prefill"
AT_REST = "at rest"


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What lies on a GPU at the worst moment of a phase."""

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
    """The phases of one engine. `stage` is the pipeline stage that needs most. `kv_tokens` are those that a server's KV
    cache has room for, where the GPU's size is known, `kv_token_bytes` what one takes."""

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
        """Bytes that stay while engines on the same GPUs work; a server works all the time."""
        names = (AT_REST, "rollout", "load")
        return next(phase.bytes for name in names for phase in self.phases if phase.name == name)

    @property
    def fixed(self) -> int:
        """Bytes that stay even where an engine gives back what it can, for those that take turns with it."""
        return sum(item.bytes for item in self.peak.items if item.name in (CUDA, NCCL, CAPTURED))

    def phase(self, name: str) -> Phase:
        """Raises `StopIteration` for a phase that the engine does not have."""
        return next(phase for phase in self.phases if phase.name == name)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The footprints of all engines of a plan, for people and programs."""

    title: str
    gpu_bytes: int | None
    footprints: tuple[Footprint, ...]

    def to_json(self) -> dict[str, Any]:
        """Bytes of every item, by engine and phase."""
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
        return {"allocation": self.title, "gpu_bytes": self.gpu_bytes, "engines": engines}

    def _repr_html_(self) -> str:
        return render_html(self)


# What an item is offloaded by, by the first word of its name.
_OFFLOADED_BY = {
    "weights": "param_offload",
    "gradients": "grad_offload",
    "main": "optimizer_offload",
    "Adam's": "optimizer_offload",
}


def staying(static: Sequence[Item], settings: MegatronSettings, *needed: str) -> list[Item]:
    """What is on the GPU in a phase that needs some of it: the rest is too, unless it is offloaded."""
    words = [(item, item.name.partition(" ")[0]) for item in static]
    return [
        item
        for item, word in words
        if word in needed or not (settings.offload or getattr(settings, _OFFLOADED_BY[word]))
    ]


def with_reserve(named: Mapping[str, Sequence[Item]], beside: Sequence[Item]) -> list[Phase]:
    """Phases with what is needed beside their tensors, and what torch's allocator keeps of the GPU unused."""
    phases = []
    for name, items in named.items():
        reserve = Item(RESERVE, int(FRAGMENTATION * sum(item.bytes for item in items)))
        phases.append(Phase(name, tuple(item for item in (*items, reserve, *beside) if item.bytes)))
    return phases


def forward_only(phases: Iterable[Phase]) -> Iterator[Phase]:
    """What a reference model needs, which has weights and no optimizer."""
    trained = ("gradients", "main weights", "Adam's moments", RESERVE)
    for phase in phases:
        if phase.name in ("load", "log-probs", AT_REST):
            yield Phase(phase.name, tuple(item for item in phase.items if not item.name.startswith(trained)))


def needed(prints: Sequence[Footprint], *, offload: bool) -> int:
    """Bytes that engines need together on a GPU that they share: the worst peak, and what the others leave there.

    With `offload` servers and trainers take turns, while trainers stay together in theirs, as servers do.
    """
    most = 0
    for one in prints:
        others = [other for other in prints if other is not one]
        left = [it.fixed if offload and it.is_server != one.is_server else it.idle for it in others]
        most = max(most, one.peak.bytes + sum(left))
    return most
