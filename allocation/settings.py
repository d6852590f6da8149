"""Engine settings besides the layout, as far as rules need them: Megatron options and batch."""

from dataclasses import dataclass, field

from allocation.model_spec import ModelSpec

DEFAULT_TOKENS = 16384  # of a micro-batch
ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """Megatron options, by Megatron's names and with the defaults of this project.

    The three offloads keep a part in host memory during phases that do not need it; `offload` covers all three, also
    for FSDP. `sequence_parallel` None: on whenever TP exceeds 1. `pipeline_model_parallel_layout` is Megatron's string,
    with stages split by `|` (`Et*3|(tt|)*29,t|L`).
    """

    sequence_parallel: bool | None = None
    moe_token_dispatcher_type: str = "alltoall"
    moe_enable_deepep: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    moe_layer_recompute: bool = False
    use_distributed_optimizer: bool = True
    num_distributed_optimizer_instances: int = 1
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_p2p_comm: bool = True
    microbatch_group_size_per_vp_stage: int | None = None
    make_vocab_size_divisible_by: int = 1
    nccl_algo: str | None = None
    deterministic_mode: bool = False
    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    offload: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "float32"
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The batch of one training step.

    `n_prompts` prompts with `n_samples` responses each are split into `n_minibatches` optimizer steps. `max_length` is
    the longest sequence in tokens, prompt and response. Sequences are packed up to `max_tokens_per_mb` tokens, unless
    `micro_batch` gives a fixed number of sequences per micro-batch. `image_share` is the share of images in the tokens
    of the prompt that has the most.
    """

    n_prompts: int
    n_samples: int = 1
    n_minibatches: int = 1
    max_length: int | None = None
    max_tokens_per_mb: int | None = None
    micro_batch: int | None = None
    image_share: float = 0.0

    @property
    def sequences(self) -> int:
        """Sequences of one step."""
        return self.n_prompts * self.n_samples


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Further settings that determine memory.

    `gpu_bytes` None: the size of a GPU is unknown. A weight update sends `bucket_bytes` per batch, and gathers
    `ahead_bytes` before the first batch. `mem_fraction_static` is SGLang's share of a GPU for weights and KV cache.
    With `offload`, engines that share GPUs are time-shared and wait in host memory. `trained` is the share of the
    parameters that have gradients and optimizer state: less than 1 with LoRA. `gradient_checkpointing` and
    `offload_params` are FSDP's; the latter keeps weights and optimizer on the host. `merged_experts` are the parameters
    of a layer's experts that an FSDP actor computes with merged adapters, `served_adapters` those of all adapters that
    a rollout server has memory for. `tower_trained`: the vision tower is trained with the language model.
    `mtp_trained`: the actor trains the model's layer for multi-token prediction, if any. `fp8_servers`: rollout servers
    compute linear layers in FP8.
    """

    gpu_bytes: int | None = None
    dtype: str = "bfloat16"
    mem_fraction_static: float = 0.8
    bucket_bytes: int = 512 << 20
    ahead_bytes: int = 4096 << 20
    offload: bool = False
    trained: float = 1.0
    merged_experts: int = 0
    served_adapters: int = 0
    gradient_checkpointing: bool = False
    offload_params: bool = False
    tower_trained: bool = True
    mtp_trained: bool = False
    fp8_servers: bool = False

    @property
    def item(self) -> int:
        """Bytes of one number of type `dtype`."""
        return ITEMS[self.dtype]


@dataclass(frozen=True, slots=True)
class Workload:
    """The input of the memory model beside an engine."""

    model: ModelSpec
    megatron: MegatronSettings = field(default_factory=MegatronSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    batch: BatchSpec | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, over the ranks of context parallelism."""
        batch = self.batch
        if batch is None:
            return DEFAULT_TOKENS
        if batch.micro_batch is not None and batch.max_length is not None:
            return batch.micro_batch * batch.max_length
        return batch.max_tokens_per_mb or max(DEFAULT_TOKENS, batch.max_length or 0)

    @property
    def predicts(self) -> bool:
        """Whether a Megatron trainer has a layer for multi-token prediction."""
        return self.memory.mtp_trained and self.model.mtp_layers > 0

    @property
    def image_tokens(self) -> int:
        """Most tokens of images in a micro-batch."""
        return int(self.tokens * self.batch.image_share) if self.batch is not None else 0
