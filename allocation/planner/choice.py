"""Layouts with their predicted step times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from allocation.pipeline import Ends
from allocation.plan import ParallelSizes
from allocation.planner.task import Task
from allocation.settings import MegatronSettings

Sharing = Literal["resident", "alternate"]


@dataclass(frozen=True)
class PredictedTrainer:
    """A trainer's layout with the seconds of a step, by cause; `tokens` is the size of a micro-batch."""

    sizes: ParallelSizes
    megatron: MegatronSettings
    tokens: int
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

    @property
    def recomputed(self) -> str:
        """The part that the backward pass recomputes, in a word."""
        return {None: "", "selective": "experts"}.get(self.megatron.recompute_granularity, "full")

    def keys(self) -> dict[str, Any]:
        """Return the keys of a run that differ from their defaults, except the layout's."""
        megatron = self.megatron
        names = (
            *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
            "optimizer_offload",
        )
        values = {f"actor.megatron.{name}": getattr(megatron, name) for name in names}
        ends = zip(("first", "last"), self.ends, strict=True)
        overrides = "actor.megatron.override_transformer_config"
        values |= {f"{overrides}.num_layers_in_{which}_pipeline_stage": n for which, n in ends}
        return {"actor.mb_spec.max_tokens_per_mb": self.tokens} | {name: it for name, it in values.items() if it}


@dataclass(frozen=True)
class PredictedServers:
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
    """A layout with its predicted step.

    `update` are the seconds of a weight update, `peak` the bytes of the fullest GPU. `sharing` is how trainer and
    servers share GPUs (`rollout.sharing`), None where they do not. `staleness` is η, 0 for synchronous training.
    """

    allocation: str
    seconds: float
    trainer: PredictedTrainer
    servers: PredictedServers
    update: float
    sharing: Sharing | None
    staleness: int
    peak: int

    @property
    def shared(self) -> bool:
        return self.sharing is not None

    @property
    def bottleneck(self) -> str:
        if self.shared or not self.staleness:
            return "both, one after the other"
        return "rollout" if self.servers.seconds > self.trainer.seconds else "training"

    def keys(self, task: Task) -> dict[str, Any]:
        """Return the keys of a run with this layout and its settings."""
        return {
            "allocation_mode": self.allocation,
            "cluster.n_nodes": task.cluster.n_nodes,
            "cluster.n_gpus_per_node": task.cluster.n_gpus_per_node,
            **({"rollout.sharing": self.sharing} if self.sharing else {}),
            "rollout.max_head_offpolicyness": self.staleness,
            "sglang.mem_fraction_static": self.servers.share,
            **self.trainer.keys(),
            "train_dataset.batch_size": task.batch.n_prompts,
            "train_dataset.max_prompt_length": task.prompt,
            "gconfig.n_samples": task.batch.n_samples,
            "gconfig.max_new_tokens": task.response,
        }

    def to_json(self, task: Task) -> dict[str, Any]:
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
            "recompute_modules": list(megatron.recompute_modules),
            "optimizer_offload": megatron.optimizer_offload,
            "max_tokens_per_mb": self.trainer.tokens,
            "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_pipeline_stage,
            "sharing": self.sharing,
            "staleness": self.staleness,
            "sglang.mem_fraction_static": self.servers.share,
            "requests_per_server": self.servers.concurrency,
            "peak_bytes": self.peak,
            "keys": self.keys(task),
        }
