"""Training backends: `megatron` and `fsdp` of a role."""

from typing import Annotated, Any, Literal

from pydantic import Field

from areal_like.core.config.ignored import CPU, Ignored, for_reference
from areal_like.core.config.section import PATH, Section

RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
PRECISIONS = (
    "main_params_dtype",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)  # of the optimizer's numbers
_NOT_FROM_CHECKPOINT = Ignored("`use_dist_checkpointing` is `false`", lambda at: not at.section.use_dist_checkpointing)
_NO_BACKWARD = for_reference("a reference has no backward pass")
_NO_OPTIMIZER = for_reference("a reference has no optimizer")
_NOT_THE_ACTOR = Ignored("only the actor has a draft model (`ref` and `critic`)", lambda at: at.role != "actor")
_OFFLOADED = Ignored(
    "`offload` of the role is `true`", lambda at: at.role in at.run.roles and at.run.roles[at.role].offload
)


class MegatronConfig(Section):
    """Megatron trainer settings; parallel sizes come from the allocation only."""

    bridge_type: Literal["mbridge", "megatron-bridge"] = "mbridge"
    """Library that converts weights between Hugging Face and Megatron."""
    use_deterministic_algorithms: bool = False
    """Use bitwise reproducible kernels only; slower."""
    use_distributed_optimizer: Annotated[bool, _NO_OPTIMIZER] = True
    """Shard the optimizer state over the data-parallel ranks."""
    use_dist_checkpointing: bool = False
    """Start from `dist_checkpointing_path`; `path` then needs no weights."""
    dist_checkpointing_path: Annotated[str | None, PATH, _NOT_FROM_CHECKPOINT] = None
    """Megatron distributed checkpoint of any layout, such as one that `areal-like convert-checkpoint` writes."""
    recompute_granularity: Annotated[Literal["full", "selective"] | None, _NO_BACKWARD] = None
    """Activations to recompute in the backward pass; null: none."""
    recompute_method: Annotated[Literal["uniform", "block"] | None, _NO_BACKWARD] = None
    """How `recompute_granularity: full` selects layers."""
    recompute_num_layers: Annotated[int | None, _NO_BACKWARD] = Field(None, ge=1)
    """Layers per recomputed unit (`uniform`) or recomputed layers (`block`)."""
    recompute_modules: Annotated[list[RecomputedModule] | None, _NO_BACKWARD] = None
    """Modules that `recompute_granularity: selective` recomputes; null: `core_attn`."""
    moe_layer_recompute: Annotated[bool, _NO_BACKWARD] = False
    """Recompute MoE layers in the backward pass, as `moe` in `recompute_modules` does."""
    moe_token_dispatcher_type: Literal["alltoall", "flex", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts; `flex` is DeepEP. `allgather` is refused, because it needs
    micro-batches of equal length."""
    moe_grouped_gemm: bool = True
    """Compute all experts of a rank in one call. `false` computes them one by one and needs `bridge_type:
    megatron-bridge`."""
    overlap_grad_reduce: Annotated[bool | None, _NO_OPTIMIZER] = None
    """Overlap the gradient reduction over data-parallel ranks with the backward pass; null: on GPUs with data
    parallelism."""
    overlap_param_gather: Annotated[bool, _NO_OPTIMIZER] = False
    """Overlap gathering the updated weights with the next forward pass; needs `use_distributed_optimizer` and
    `overlap_grad_reduce`."""
    param_offload: Annotated[bool, _OFFLOADED, CPU] = False
    """Keep weights in host memory except during computation, weight updates and checkpoints."""
    grad_offload: Annotated[bool, _NO_OPTIMIZER, _OFFLOADED, CPU] = False
    """Free gradient memory except during forward and backward passes."""
    optimizer_offload: Annotated[bool, _NO_OPTIMIZER, _OFFLOADED, CPU] = False
    """Keep the optimizer state, fp32 weights included, in host memory except during optimizer steps and checkpoints."""
    use_precision_aware_optimizer: Annotated[bool, _NO_OPTIMIZER] = False
    """Use low-precision optimizer states, as the next four keys set them (Transformer Engine's Adam, GPUs only)."""
    main_params_dtype: Annotated[Literal["float32", "float16"], _NO_OPTIMIZER] = "float32"
    """Data type of the optimizer's main weights."""
    main_grads_dtype: Annotated[Literal["float32", "bfloat16"], _NO_OPTIMIZER] = "float32"
    """Data type in which gradients are reduced and passed to the optimizer."""
    exp_avg_dtype: Annotated[Literal["float32", "float16", "bfloat16"], _NO_OPTIMIZER] = "float32"
    """Data type of the first moment."""
    exp_avg_sq_dtype: Annotated[Literal["float32", "float16", "bfloat16"], _NO_OPTIMIZER] = "float32"
    """Data type of the second moment."""
    train_mtp_layers: Annotated[bool, _NOT_THE_ACTOR] = False
    """Train the actor's layer for multi-token prediction (`num_nextn_predict_layers` in config.json) beside the policy,
    and save it. The layer's loss has no gradient in the policy."""
    override_transformer_config: dict[str, Any] = Field({})
    """More fields of Megatron-core's TransformerConfig, by name. Unknown names and values that TransformerConfig
    rejects are refused before the start."""


class FSDPConfig(Section):
    """FSDP trainer settings."""

    gradient_checkpointing: Annotated[bool, _NO_BACKWARD] = False
    """Recompute each layer's activations in the backward pass."""
    offload_params: Annotated[bool, CPU] = False
    """Keep parameters, gradients and optimizer state in host memory."""
