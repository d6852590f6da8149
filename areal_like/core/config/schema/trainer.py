"""Roles on trainer ranks: their settings and backends, `ref`, `critic`, and `warm_start`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from areal_like.core.config.ignored import CPU, Ignored, for_reference, ignored_if
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
    """Use bitwise reproducible kernels only; slower. On a GPU their attention needs memory that grows with the
    square of `mb_spec.max_tokens_per_mb`."""
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


type TrainerRole = Literal["actor", "ref", "critic"]
DType = Literal["float32", "bfloat16", "float16"]


def _texts(variables: Any) -> Any:
    """Return environment variables as text where YAML has read some as numbers."""
    if not isinstance(variables, dict):
        return variables
    return {
        name: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in variables.items()
    }


TEXTS = BeforeValidator(_texts)
_CONSTANT = Ignored("`lr_scheduler_type` is `constant`", lambda at: at.section.lr_scheduler_type == "constant")
_DENSE = Ignored("`num_experts` is `null`", lambda at: at.section.num_experts is None)
_EXPERTS = Ignored("`num_experts` is set: all layers have experts", lambda at: at.section.num_experts is not None)
_TEXT_ALONE = Ignored("`vision_layers` is `null`", lambda at: at.section.vision_layers is None)
_FSDP_OFFLOADS = Ignored(
    "`fsdp.offload_params` is `true`", lambda at: at.backend == "fsdp" and at.section.fsdp.offload_params
)
NOT_MEGATRON = Ignored(
    "the role's backend is FSDP", lambda at: at.backend == "fsdp", but=("use_deterministic_algorithms",)
)
NOT_FSDP = Ignored("the role's backend is Megatron", lambda at: at.backend == "megatron")


class InitModelConfig(Section):
    """A Qwen3 model with random weights, written in Hugging Face form at the start of the run.

    With `vision_layers` it is a Qwen3-VL, which sees images.
    """

    tokenizer: Literal["arithmetic", "bytes"] = "arithmetic"
    """`arithmetic`: the generated problems' words and single digits; `bytes`: any text."""
    vocab_size: int | None = Field(None, ge=1)
    """Embedding rows; null: the size of the tokenizer."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(3, ge=1, le=10**4)
    """Number of layers."""
    num_attention_heads: int = Field(4, ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(2, ge=1)
    """Key/value heads (GQA groups)."""
    head_dim: int = Field(32, ge=2)
    """Width of one head; even."""
    intermediate_size: Annotated[int, _EXPERTS] = Field(384, ge=1)
    """Width of the dense feed-forward layer."""
    max_position_embeddings: int = Field(512, ge=1)
    """Longest sequence, in tokens."""
    tie_word_embeddings: bool = True
    """Share the input embedding with the output layer; must be false for models with experts."""
    num_experts: int | None = Field(None, ge=2)
    """Experts per layer (Qwen3-MoE); null: a dense model."""
    num_experts_per_tok: Annotated[int, _DENSE] = Field(2, ge=1)
    """Experts per token."""
    moe_intermediate_size: Annotated[int, _DENSE] = Field(128, ge=1)
    """Width of one expert's feed-forward layer."""
    vision_layers: int | None = Field(None, ge=1, le=10**4)
    """Layers of the vision tower (Qwen3-VL); null: a model of text alone."""
    vision_hidden_size: Annotated[int, _TEXT_ALONE] = Field(64, ge=32, le=10**6, multiple_of=32)
    """Width of the vision tower; its heads are 32 wide."""

    @property
    def sees_images(self) -> bool:
        """Whether the model has a vision tower."""
        return self.vision_layers is not None


class MicroBatchConfig(Section):
    """Micro-batches: how a batch is split."""

    max_tokens_per_mb: int = Field(16384, ge=1)
    """Maximum tokens of a packed micro-batch of one data-parallel rank, counted over its context-parallel ranks."""
    share_prompts: bool = False
    """Compute a prompt, and every other prefix that sequences of a group share, once in a micro-batch, with the same
    gradients."""


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    type: Literal["adam"] = "adam"
    """`adam`: AdamW with decoupled weight decay."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    gradient_clipping: float = Field(1.0, gt=0)
    """Maximum global gradient norm."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up, over all steps of the run."""
    lr_decay_steps: Annotated[int | None, _CONSTANT] = Field(None, ge=1)
    """Optimizer steps, with the warm-up, after which the learning rate is final; null: those of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises linearly from 0."""
    warmup_steps_proportion: float = Field(0.0, ge=0, lt=1)
    """`warmup_steps` as a share of the run's optimizer steps; the larger of the two applies."""
    min_lr_ratio: Annotated[float, _CONSTANT] = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of `lr`."""
    max_skipped_steps: int = Field(3, ge=0)
    """Maximum consecutive optimizer steps that are skipped because the gradient is not finite; the next one ends the
    run."""

    def warmup(self, total_steps: int) -> int:
        """Return the optimizer steps of the warm-up in a run of so many."""
        return max(self.warmup_steps, int(self.warmup_steps_proportion * total_steps))


class EngineConfig(Section):
    """A model on trainer ranks, and the settings that every such role has."""

    backend: str | None = None
    """Layout of the trainer, such as `megatron:d2`."""
    path: Annotated[str | None, PATH] = None
    """Model in Hugging Face form: a directory or a name on the hub."""
    dtype: DType = "bfloat16"
    """Data type of weights and activations, also of the servers; `float16` trains with a dynamic loss scale (see
    [precision](run.md#precision))."""
    fp32_head: bool = False
    """Compute the logits of the output layer in float32, here and on the servers (see
    [precision](run.md#precision))."""
    freeze_vision_tower: bool = False
    """Freeze the vision tower and its projector in a vision-language model, in the actor and the critic. Adapters
    (`use_lora`) never train them."""
    mb_spec: MicroBatchConfig = MicroBatchConfig()
    """Micro-batches."""
    megatron: Annotated[MegatronConfig, NOT_MEGATRON] = MegatronConfig()
    """Megatron settings."""
    fsdp: Annotated[FSDPConfig, NOT_FSDP] = FSDPConfig()
    """FSDP settings (`backend: fsdp:d4`)."""
    offload: Annotated[bool, CPU, _FSDP_OFFLOADS] = False
    """Keep weights, gradients and optimizer state in host memory between calls. Sets `param_offload`, `grad_offload`
    and `optimizer_offload`, with any backend."""
    env_vars: Annotated[dict[str, str], TEXTS] = Field({})
    """Environment variables of the ranks, such as `NVTE_FUSED_ATTN`; they take precedence over the run's own."""
    timeout_s: float = Field(1800.0, gt=0)
    """Maximum seconds of one trainer call, such as loading, a step or a checkpoint."""


class WarmStartConfig(Section):
    """Supervised training on reference answers before reinforcement learning, with the same engine."""

    steps: int = Field(ge=1)
    """Maximum optimizer steps."""
    batch_size: int = Field(256, ge=1)
    """Problems per optimizer step."""
    lr: float = Field(2e-3, gt=0)
    """Constant learning rate."""
    target_reward: float = Field(1.0, gt=0, le=1)
    """Stop when the mean probability of the evaluation prompts' reference answers reaches this. It is the evaluation
    reward where a response must match its reference."""
    check_every: int = Field(25, ge=1)
    """Optimizer steps between two evaluations."""


_PLACED = Ignored(
    "`backend` is null or names GPUs with `@`",
    lambda at: (backend := getattr(at.run, at.role).backend) is None or "@" in backend,
)
_SEPARATE = Ignored("`type` is `separation`", lambda at: at.section.type == "separation")


class SchedulingStrategyConfig(Section):
    """Placement of a role."""

    type: Annotated[Literal["colocation", "separation"], _PLACED] = "colocation"
    """`colocation`: on the GPUs of `target`; `separation`: on GPUs of its own."""
    target: Annotated[Literal["actor", "rollout"], _SEPARATE] = "actor"
    """Role whose GPUs are shared."""


class RoleConfig(Section):
    """A model beside the actor, on trainer ranks of its own. null means the actor's value."""

    backend: str | None = None
    """Layout, such as `megatron:t2`; null: from `allocation_mode`, else the actor's layout on the actor's GPUs."""
    scheduling_strategy: SchedulingStrategyConfig = SchedulingStrategyConfig()
    """Placement of `backend`, unless it names GPUs with `@`."""
    path: Annotated[str | None, PATH] = None
    """Model in Hugging Face form: a directory or a name on the hub; null: the actor's."""
    dtype: DType | None = None
    """Data type of weights and activations; null: the actor's."""
    mb_spec: MicroBatchConfig | None = None
    """Micro-batches; null: the actor's."""
    megatron: Annotated[MegatronConfig | None, NOT_MEGATRON] = None
    """Megatron settings; null: the actor's."""
    fsdp: Annotated[FSDPConfig | None, NOT_FSDP] = None
    """FSDP settings; null: the actor's."""
    offload: Annotated[bool | None, CPU] = None
    """Keep the model in host memory between calls; null: the actor's setting."""
    env_vars: Annotated[dict[str, str] | None, TEXTS] = None
    """Environment variables of the ranks; null: the actor's."""
    timeout_s: float | None = Field(None, gt=0)
    """Maximum seconds of one call; null: the actor's."""


class ReferenceConfig(RoleConfig):
    """The reference policy: computes log-probs and is not trained."""

    fp32_head: bool | None = None
    """Compute logits in float32; null: as the actor."""
    update_every_steps: int | None = Field(None, ge=1)
    """Training steps between updates of the reference from the actor; null: the reference is fixed."""
    ema_decay: Annotated[float, ignored_if("ref.update_every_steps", None)] = Field(0.0, ge=0, lt=1)
    """Share of the reference that an update keeps (exponential moving average); 0: the reference becomes the actor. In
    bfloat16, changes below 1/256 of a weight are lost."""


class CriticConfig(RoleConfig):
    """The critic: the model with a value head and an optimizer of its own."""

    optimizer: OptimizerConfig | None = None
    """The optimizer; null: the actor's settings."""
    eps_clip: float | None = Field(0.5, gt=0)
    """Clip range of a value around its value before the step, in units of reward; null: no clip."""
    warmup_steps: int = Field(0, ge=0)
    """Training steps that train only the critic, before the actor is trained too."""
