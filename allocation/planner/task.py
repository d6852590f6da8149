"""The input of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from allocation import efficiency as eff
from allocation.hardware import GPUS, Gpu
from allocation.model_spec import ModelSpec
from allocation.pipeline import EVEN, Ends
from allocation.plan import Cluster
from allocation.settings import BatchSpec, MegatronSettings, MemorySettings, Workload

PLAIN = MegatronSettings()
EXPERTS = MegatronSettings(recompute_granularity="selective", recompute_modules=("moe",))
FULL = MegatronSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SHARE = 0.8  # a server's share of a GPU
SHARED_SHARE = 0.4  # of a GPU that it has together with a trainer
POWERS = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (8192, 16384, 32768, 65536)  # tokens


@lru_cache(1024)
def with_ends(settings: MegatronSettings, ends: Ends) -> MegatronSettings:
    """Return the settings with layers of the first and of the last stage."""
    first, last = ends
    return replace(settings, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)


@dataclass(frozen=True)
class Task:
    """The input of the planner.

    `prompt` and `response` are maximum lengths in tokens; `staleness` is η, 0 for synchronous training.
    `batch.max_tokens_per_mb` are the tokens of a micro-batch, None to try several; `batch.max_length` is prompt and
    response together. `ends` are the required layers of the first and the last pipeline stage.
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
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.response

    @property
    def tokens(self) -> float:
        """Tokens trained per step, prompts included."""
        return self.batch.sequences * (self.prompt * eff.MEAN_OF_LONGEST + self.mean_response)

    @property
    def generated(self) -> float:
        return self.batch.sequences * self.mean_response

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Tokens of the micro-batches to try, ascending, at least as many as in the longest sequence."""
        if self.batch.max_tokens_per_mb is not None:
            return (max(self.batch.max_tokens_per_mb, self.longest),)
        least = -(-self.longest // 64) * 64
        return (least, *(tokens for tokens in MICRO_BATCHES if tokens > least))

    def work(
        self, megatron: MegatronSettings, share: float = SHARE, tokens: int | None = None, *, offload: bool = False
    ) -> Workload:
        """Return the memory model's workload with micro-batches of so many tokens, by default the fewest to try."""
        tokens = -(-(tokens or self.micro_batches[0]) // 64) * 64
        batch = replace(self.batch, max_length=self.longest, max_tokens_per_mb=tokens)
        memory = MemorySettings(self.gpu.memory, self.dtype, share, offload=offload)
        return Workload(self.model, megatron, memory, batch)
