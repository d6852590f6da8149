"""The input of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from allocation import efficiency as eff
from allocation.hardware import GPUS, Gpu
from allocation.model_spec import ModelSpec
from allocation.pipeline import EVEN, Ends
from allocation.plan import Cluster
from allocation.settings import BatchSpec, MegatronSettings, MemorySettings, Workload

PLAIN = MegatronSettings()
FULL = MegatronSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARE = 0.8  # a server's share of a GPU
SHARED_SHARE = 0.4  # of a GPU that it has together with a trainer
POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Task:
    """The input of the planner.

    `prompt` and `response` are maximum lengths in tokens; `staleness` is η, 0 for synchronous training.
    `batch.max_tokens_per_mb` are the tokens of a micro-batch, `batch.max_length` prompt and response together. `ends`
    are the required layers of the first and the last pipeline stage.
    """

    model: ModelSpec
    cluster: Cluster
    gpu: Gpu = field(default_factory=lambda: GPUS["h100"])
    batch: BatchSpec = field(default_factory=lambda: BatchSpec(256, 8))
    prompt: int = 1024
    response: int = 8192
    staleness: int = 1
    dtype: str = "bfloat16"
    ends: Ends = EVEN

    @property
    def mean_response(self) -> float:
        return self.response * eff.MEAN_OF_LONGEST

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return MemorySettings(dtype=self.dtype).item

    @property
    def tokens(self) -> float:
        """Tokens trained per step, prompts included."""
        return self.batch.sequences * (self.prompt * eff.MEAN_OF_LONGEST + self.mean_response)

    @property
    def generated(self) -> float:
        return self.batch.sequences * self.mean_response

    def work(self, megatron: MegatronSettings, share: float = SHARE) -> Workload:
        """Return the memory model's workload; micro-batches hold at least the longest sequence."""
        longest = self.prompt + self.response
        tokens = max(longest, self.batch.max_tokens_per_mb or 0)
        batch = replace(self.batch, max_length=longest, max_tokens_per_mb=-(-tokens // 64) * 64)
        return Workload(self.model, megatron, MemorySettings(self.gpu.memory, self.dtype, share), batch)

    @property
    def mb_tokens(self) -> int:
        """Tokens of a micro-batch, at least as many as in the longest sequence."""
        return max(self.batch.max_tokens_per_mb or 0, self.prompt + self.response)
