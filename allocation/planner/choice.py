"""Layouts with their predicted step times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allocation.pipeline import Ends
from allocation.plan import ParallelSizes
from allocation.settings import MegatronSettings


@dataclass(frozen=True)
class Trainer:
    """A trainer's layout with the seconds of a step, by cause."""

    sizes: ParallelSizes
    megatron: MegatronSettings
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def ends(self) -> Ends:
        """Layers of the first and the last stage, if they differ from the others."""
        settings = self.megatron
        return settings.num_layers_in_first_pipeline_stage, settings.num_layers_in_last_pipeline_stage

    @property
    def text(self) -> str:
        """The member of an allocation."""
        s = self.sizes
        attn = f"d{s.dp}" + "".join(f"{letter}{n}" for letter, n in (("p", s.pp), ("t", s.tp), ("c", s.cp)) if n > 1)
        return f"megatron:(attn:{attn}|ffn:e{s.ep})" if s.ep > 1 else f"megatron:{attn}"


@dataclass(frozen=True)
class Servers:
    """`dp` servers of `tp` GPUs: seconds to generate a batch together, and of the longest response alone.

    `share` is `sglang.mem_fraction_static`.
    """

    dp: int
    tp: int
    share: float
    concurrency: int
    seconds: float
    longest: float

    @property
    def text(self) -> str:
        return f"sglang:d{self.dp}" + (f"t{self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True)
class Choice:
    """A layout with its predicted step; `peak` are the bytes of its fullest GPU."""

    allocation: str
    seconds: float
    trainer: Trainer
    servers: Servers
    update: float
    shared: bool
    peak: int

    @property
    def bottleneck(self) -> str:
        if self.shared:
            return "both, one after the other"
        return "rollout" if self.servers.seconds > self.trainer.seconds else "training"

    def to_json(self) -> dict[str, Any]:
        """Return all fields, in seconds and bytes."""
        megatron = self.trainer.megatron
        return {
            "allocation": self.allocation,
            "step_seconds": self.seconds,
            "training_seconds": self.trainer.parts,
            "rollout_seconds": self.servers.seconds,
            "longest_response_seconds": self.servers.longest,
            "weight_update_seconds": self.update,
            "recompute_granularity": megatron.recompute_granularity,
            "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
            "sglang.mem_fraction_static": self.servers.share,
            "requests_per_server": self.servers.concurrency,
            "peak_bytes": self.peak,
        }
