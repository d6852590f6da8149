"""Training: `actor`, `ref`, `critic` and `warm_start`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from areal_like.config.schema.ignored import CPU, Ignored, for_reference, ignored_if, with_settings
from areal_like.config.schema.section import PATH, Section

type TrainerRole = Literal["actor", "ref", "critic"]
PRECISIONS = (
    "main_params_dtype",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)  # of the optimizer's numbers
ALL_LINEAR = "all-linear"  # of actor.target_modules
RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
KLEstimator = Literal["k1", "k2", "k3"]
BehaviourMode = Literal[
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
    "disabled",
]


def _texts(variables: Any) -> Any:
    """Environment variables, whose values are text, where YAML has read some as numbers."""
    if not isinstance(variables, dict):
        return variables
    return {
        name: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in variables.items()
    }


_TEXTS = BeforeValidator(_texts)

_CONSTANT = Ignored("`lr_scheduler_type` is `constant`", lambda at: at.section.lr_scheduler_type == "constant")
_OWN_LOSS = Ignored(
    "`algorithm` is `dpo` or `sft`, which have losses of their own", lambda at: at.run.algorithm in ("dpo", "sft")
)
_NOT_DPO = Ignored("`algorithm` is not `dpo`", lambda at: at.settings is not None or at.run.algorithm == "sft")
_ONE_MINIBATCH = with_settings(
    "with one mini-batch and the decoupled loss the clipped ratio is 1",
    lambda run, settings: settings.use_decoupled_loss and run.actor.ppo_n_minibatches == 1,
)
_CISPO = with_settings("`cispo` clips the ratio of every advantage", lambda run, settings: settings.cispo)
_NOT_DECOUPLED = with_settings("`use_decoupled_loss` is `false`", lambda run, settings: not settings.use_decoupled_loss)
_NO_BEHAVIOUR_WEIGHT = with_settings(
    "`behave_imp_weight_mode` is `disabled`", lambda run, settings: settings.behave_imp_weight_mode == "disabled"
)
_NO_KL = with_settings(
    "`kl_ctl` and `kl_loss_coef` are 0", lambda run, settings: not settings.kl_ctl and not settings.kl_loss_coef
)
_NO_CRITIC = with_settings("the algorithm has no critic", lambda run, settings: not settings.critic)
_NO_OVERLONG = with_settings(
    "`overlong_penalty_factor` is 0", lambda run, settings: not settings.overlong_penalty_factor
)
_NOT_DROPPED = with_settings("`dynamic_sampling` is `false`", lambda run, settings: not settings.dynamic_sampling)
_MORE_THAN_ADVANTAGES = with_settings(
    "the loss has more terms than advantages (critic, `entropy_coeff`, `kl_loss_coef`)",
    lambda run, settings: not settings.only_advantages,
)
_NOT_FROM_CHECKPOINT = Ignored("`use_dist_checkpointing` is `false`", lambda at: not at.section.use_dist_checkpointing)
_DENSE = Ignored("`num_experts` is `null`", lambda at: at.section.num_experts is None)
_EXPERTS = Ignored("`num_experts` is set: all layers have experts", lambda at: at.section.num_experts is not None)
_NO_BACKWARD = for_reference("a reference has no backward pass")
_NO_OPTIMIZER = for_reference("a reference has no optimizer")
_OFFLOADED = Ignored(
    "`offload` of the role is `true`", lambda at: at.role in at.run.roles and at.run.roles[at.role].offload
)
_FSDP_OFFLOADS = Ignored(
    "`fsdp.offload_params` is `true`", lambda at: at.backend == "fsdp" and at.section.fsdp.offload_params
)
_NOT_MEGATRON = Ignored(
    "the role's backend is FSDP", lambda at: at.backend == "fsdp", but=("use_deterministic_algorithms",)
)
_NOT_FSDP = Ignored("the role's backend is Megatron", lambda at: at.backend == "megatron")
_PLACED = Ignored(
    "`backend` is null or names GPUs with `@`",
    lambda at: (backend := getattr(at.run, at.role).backend) is None or "@" in backend,
)
_SEPARATE = Ignored("`type` is `separation`", lambda at: at.section.type == "separation")


class InitModelConfig(Section):
    """A Qwen3 model with random weights, written in Hugging Face form at the start of the run."""

    tokenizer: Literal["arithmetic", "bytes"] = Field(
        "arithmetic", description="`arithmetic`: the generated problems' words and single digits; `bytes`: any text."
    )
    vocab_size: int | None = Field(None, ge=1, description="Embedding rows; null: the size of the tokenizer.")
    hidden_size: int = Field(128, ge=8, description="Width of the residual stream.")
    num_hidden_layers: int = Field(3, ge=1, le=10**4, description="Number of layers.")
    num_attention_heads: int = Field(4, ge=1, description="Query heads.")
    num_key_value_heads: int = Field(2, ge=1, description="Key/value heads (GQA groups).")
    head_dim: int = Field(32, ge=2, description="Width of one head; even.")
    intermediate_size: Annotated[int, _EXPERTS] = Field(384, ge=1, description="Width of the dense feed-forward layer.")
    max_position_embeddings: int = Field(512, ge=1, description="Longest sequence, in tokens.")
    tie_word_embeddings: bool = Field(
        True, description="Share the input embedding with the output layer; must be false for models with experts."
    )
    num_experts: int | None = Field(None, ge=2, description="Experts per layer (Qwen3-MoE); null: a dense model.")
    num_experts_per_tok: Annotated[int, _DENSE] = Field(2, ge=1, description="Experts per token.")
    moe_intermediate_size: Annotated[int, _DENSE] = Field(
        128, ge=1, description="Width of one expert's feed-forward layer."
    )


class MicroBatchConfig(Section):
    """Micro-batches: how a batch is split."""

    max_tokens_per_mb: int = Field(
        16384,
        ge=1,
        description=(
            "Maximum tokens of a packed micro-batch of one data-parallel rank, counted over its context-parallel ranks."
        ),
    )
    share_prompts: bool = Field(
        False,
        description=(
            "Compute a prompt once for all of its samples in a micro-batch, with the same gradients. Not with "
            "Megatron's context parallelism."
        ),
    )


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    type: Literal["adam"] = Field("adam", description="`adam`: AdamW with decoupled weight decay.")
    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    gradient_clipping: float = Field(1.0, gt=0, description="Maximum global gradient norm.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning-rate schedule after the warm-up, over all steps of the run."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps in which the learning rate rises linearly from 0.")
    warmup_steps_proportion: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="`warmup_steps` as a share of the run's optimizer steps; the larger of the two applies.",
    )
    min_lr_ratio: Annotated[float, _CONSTANT] = Field(
        0.0, ge=0, le=1, description="Final learning rate as a share of `lr`."
    )
    max_skipped_steps: int = Field(
        3,
        ge=0,
        description=(
            "Maximum consecutive optimizer steps that are skipped because the gradient is not finite; the next "
            "one ends the run."
        ),
    )

    def warmup(self, total_steps: int) -> int:
        """Return the optimizer steps of the warm-up in a run of so many."""
        return max(self.warmup_steps, int(self.warmup_steps_proportion * total_steps))


class MegatronConfig(Section):
    """Megatron trainer settings; parallel sizes come from the allocation only."""

    bridge_type: Literal["mbridge", "megatron-bridge"] = Field(
        "mbridge", description="Library that converts weights between Hugging Face and Megatron."
    )
    use_deterministic_algorithms: bool = Field(False, description="Use bitwise reproducible kernels only; slower.")
    use_distributed_optimizer: Annotated[bool, _NO_OPTIMIZER] = Field(
        True, description="Shard the optimizer state over the data-parallel ranks."
    )
    use_dist_checkpointing: bool = Field(
        False,
        description="Start from `dist_checkpointing_path` instead of the weights in `path`, which then need none.",
    )
    dist_checkpointing_path: Annotated[str | None, PATH, _NOT_FROM_CHECKPOINT] = Field(
        None,
        description=(
            "Megatron distributed checkpoint of any layout, such as one that `areal-like convert-checkpoint` writes."
        ),
    )
    recompute_granularity: Annotated[Literal["full", "selective"] | None, _NO_BACKWARD] = Field(
        None, description="Activations to recompute in the backward pass; null: none."
    )
    recompute_method: Annotated[Literal["uniform", "block"] | None, _NO_BACKWARD] = Field(
        None, description="How `recompute_granularity: full` selects layers."
    )
    recompute_num_layers: Annotated[int | None, _NO_BACKWARD] = Field(
        None, ge=1, description="Layers per recomputed unit (`uniform`) or recomputed layers (`block`)."
    )
    recompute_modules: Annotated[list[RecomputedModule] | None, _NO_BACKWARD] = Field(
        None, description="Modules that `recompute_granularity: selective` recomputes; null: `core_attn`."
    )
    moe_layer_recompute: Annotated[bool, _NO_BACKWARD] = Field(
        False, description="Recompute MoE layers in the backward pass, as `moe` in `recompute_modules` does."
    )
    moe_token_dispatcher_type: Literal["alltoall", "flex", "allgather"] = Field(
        "alltoall",
        description=(
            "How tokens reach the ranks of their experts; `flex` is DeepEP. `allgather` is refused, because it "
            "needs micro-batches of equal length."
        ),
    )
    moe_grouped_gemm: bool = Field(
        True,
        description=(
            "Compute all experts of a rank in one call. `false` computes them one by one and needs `bridge_type: "
            "megatron-bridge`."
        ),
    )
    overlap_grad_reduce: Annotated[bool | None, _NO_OPTIMIZER] = Field(
        None,
        description=(
            "Overlap the gradient reduction over data-parallel ranks with the backward pass; null: on GPUs with "
            "data parallelism."
        ),
    )
    overlap_param_gather: Annotated[bool, _NO_OPTIMIZER] = Field(
        False,
        description=(
            "Overlap gathering the updated weights with the next forward pass; needs `use_distributed_optimizer` "
            "and `overlap_grad_reduce`."
        ),
    )
    param_offload: Annotated[bool, _OFFLOADED, CPU] = Field(
        False, description="Keep weights in host memory except during computation, weight updates and checkpoints."
    )
    grad_offload: Annotated[bool, _NO_OPTIMIZER, _OFFLOADED, CPU] = Field(
        False, description="Free gradient memory except during forward and backward passes."
    )
    optimizer_offload: Annotated[bool, _NO_OPTIMIZER, _OFFLOADED, CPU] = Field(
        False,
        description=(
            "Keep the optimizer state, fp32 weights included, in host memory except during optimizer steps and "
            "checkpoints."
        ),
    )
    use_precision_aware_optimizer: Annotated[bool, _NO_OPTIMIZER] = Field(
        False,
        description=(
            "Use low-precision optimizer states, as the next four keys set them (Transformer Engine's Adam, GPUs only)."
        ),
    )
    main_params_dtype: Annotated[Literal["float32", "float16"], _NO_OPTIMIZER] = Field(
        "float32", description="Data type of the optimizer's main weights."
    )
    main_grads_dtype: Annotated[Literal["float32", "bfloat16"], _NO_OPTIMIZER] = Field(
        "float32", description="Data type in which gradients are reduced and passed to the optimizer."
    )
    exp_avg_dtype: Annotated[Literal["float32", "float16", "bfloat16"], _NO_OPTIMIZER] = Field(
        "float32", description="Data type of the first moment."
    )
    exp_avg_sq_dtype: Annotated[Literal["float32", "float16", "bfloat16"], _NO_OPTIMIZER] = Field(
        "float32", description="Data type of the second moment."
    )
    override_transformer_config: dict[str, Any] = Field(
        {},
        description=(
            "More fields of Megatron-core's TransformerConfig, by name. Unknown names and values that "
            "TransformerConfig rejects are refused before the start."
        ),
    )


class FSDPConfig(Section):
    """FSDP trainer settings."""

    gradient_checkpointing: Annotated[bool, _NO_BACKWARD] = Field(
        False, description="Recompute each layer's activations in the backward pass."
    )
    offload_params: Annotated[bool, CPU] = Field(
        False, description="Keep parameters, gradients and optimizer state in host memory; no effect on CPU."
    )


class NormConfig(Section):
    """Normalisation of values: subtract a mean, divide by a standard deviation."""

    mean_level: Literal["group", "batch"] | None = Field(
        None, description="Scope of the subtracted mean: the prompt's group or the whole batch; null: subtract no mean."
    )
    mean_leave1out: bool = Field(False, description="Exclude a value from the mean it is compared with.")
    std_level: Literal["group", "batch"] | None = Field(
        None, description="Scope of the standard deviation to divide by; null: do not divide."
    )
    std_unbiased: bool = Field(False, description="Divide by n - 1 instead of n in the standard deviation.")


class EngineConfig(Section):
    """A model on trainer ranks, and the settings that every such role has."""

    backend: str | None = Field(None, description="Layout of the trainer, such as `megatron:d2`.")
    path: Annotated[str | None, PATH] = Field(
        None, description="Model in Hugging Face form: a directory or a name on the hub."
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Data type of weights and activations.")
    mb_spec: MicroBatchConfig = Field(MicroBatchConfig(), description="Micro-batches.")
    megatron: Annotated[MegatronConfig, _NOT_MEGATRON] = Field(MegatronConfig(), description="Megatron settings.")
    fsdp: Annotated[FSDPConfig, _NOT_FSDP] = Field(FSDPConfig(), description="FSDP settings (`backend: fsdp:d4`).")
    offload: Annotated[bool, CPU, _FSDP_OFFLOADS] = Field(
        False,
        description=(
            "Keep weights, gradients and optimizer state in host memory between calls. Sets `param_offload`, "
            "`grad_offload` and `optimizer_offload`, with any backend."
        ),
    )
    env_vars: Annotated[dict[str, str], _TEXTS] = Field(
        {},
        description=(
            "Environment variables of the ranks, such as `NVTE_FUSED_ATTN`; they take precedence over the run's own."
        ),
    )
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Maximum seconds of one trainer call, such as loading, a step or a checkpoint.",
    )


class ActorConfig(EngineConfig):
    """The policy to train."""

    init_model: InitModelConfig | None = Field(None, description="Start from random weights instead of `path`.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="The optimizer.")
    use_lora: bool = Field(False, description="Train low-rank adapters and freeze the weights (see [LoRA](lora.md)).")
    peft_type: Literal["lora"] = Field("lora", description="Kind of adapter.")
    lora_rank: Annotated[int, ignored_if("actor.use_lora", False)] = Field(
        32, ge=1, description="Rank of each adapter."
    )
    lora_alpha: Annotated[int, ignored_if("actor.use_lora", False)] = Field(
        16, ge=1, description="Scale of the adapters: their output is multiplied by `lora_alpha / lora_rank`."
    )
    target_modules: Annotated[list[str], ignored_if("actor.use_lora", False)] = Field(
        [ALL_LINEAR],
        min_length=1,
        description=(
            "Linear layers with adapters, by the last part of their Hugging Face names, such as `q_proj`; "
            "`all-linear`: all except the output layer."
        ),
    )
    ppo_n_minibatches: int = Field(1, ge=1, description="Optimizer steps per training step.")
    eps_clip: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH] = Field(
        None,
        gt=0,
        le=1,
        description="Lower clip range of the probability ratio, 1 - eps_clip; null: set by the algorithm.",
    )
    eps_clip_higher: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH] = Field(
        None,
        gt=0,
        description="Upper clip range, 1 + eps_clip_higher; null: `eps_clip` if set, else set by the algorithm.",
    )
    c_clip: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH, _CISPO] = Field(
        None,
        gt=1,
        description="Dual clip: maximum factor of a negative advantage; null: set by the algorithm.",
    )
    importance_sampling_level: Annotated[Literal["token", "sequence"] | None, _OWN_LOSS] = Field(
        None,
        description=(
            "Level of the clipped ratio: one token, or the geometric mean over its sequence (GSPO); null: set by "
            "the algorithm."
        ),
    )
    use_decoupled_loss: Annotated[bool | None, _OWN_LOSS] = Field(
        None,
        description=(
            "Clip against the weights at the start of the step, and weight tokens by the ratio of these to the "
            "weights that generated them (decoupled PPO). false: clip against the weights that generated them. "
            "null: set by the algorithm."
        ),
    )
    behave_imp_weight_mode: Annotated[BehaviourMode | None, _OWN_LOSS, _NOT_DECOUPLED] = Field(
        None,
        description=(
            "Behaviour importance weight (proximal over behaviour probability): per token, per sequence, or "
            "geometric mean over a sequence; `truncate` caps it, `mask` sets it to 0 beyond the cap. null: set by"
            " the algorithm."
        ),
    )
    behave_imp_weight_cap: Annotated[float | None, _OWN_LOSS, _NOT_DECOUPLED, _NO_BEHAVIOUR_WEIGHT] = Field(
        None, ge=1, description="Cap of the behaviour importance weight; null: set by the algorithm."
    )
    entropy_coeff: Annotated[float | None, _OWN_LOSS] = Field(
        None, ge=0, description="Weight of the entropy bonus in the loss; null: set by the algorithm."
    )
    kl_ctl: Annotated[float | None, _OWN_LOSS] = Field(
        None,
        ge=0,
        description="Weight of the KL divergence from `ref` in each token's reward; null: set by the algorithm.",
    )
    kl_loss_coef: Annotated[float | None, _OWN_LOSS] = Field(
        None, ge=0, description="Weight of the KL divergence from `ref` in the loss; null: set by the algorithm."
    )
    kl_estimator: Annotated[KLEstimator | None, _OWN_LOSS, _NO_KL] = Field(
        None, description="Estimator of the KL divergence; null: k1 in the reward, k3 in the loss."
    )
    reward_scaling: Annotated[float, _OWN_LOSS] = Field(
        1.0, gt=0, description="Factor of rewards, applied after `reward_bias` and before normalisation."
    )
    reward_bias: Annotated[float, _OWN_LOSS] = Field(0.0, description="Added to rewards before `reward_scaling`.")
    reward_clip: Annotated[float | None, _OWN_LOSS] = Field(
        None, gt=0, description="Maximum absolute reward after `reward_scaling`; null: no limit."
    )
    reward_norm: Annotated[NormConfig | None, _OWN_LOSS] = Field(
        None, description="Normalisation of rewards; null: set by the algorithm."
    )
    adv_norm: Annotated[NormConfig | None, _OWN_LOSS] = Field(
        None, description="Normalisation of advantages over tokens; null: set by the algorithm."
    )
    discount: Annotated[float | None, _OWN_LOSS] = Field(
        None, gt=0, le=1, description="Discount of later rewards per token; null: set by the algorithm."
    )
    gae_lambda: Annotated[float | None, _OWN_LOSS, _NO_CRITIC] = Field(
        None, ge=0, le=1, description="λ of generalised advantage estimation; null: set by the algorithm."
    )
    loss_agg_mode: Annotated[Literal["token_mean", "sequence_mean", "constant"] | None, _OWN_LOSS] = Field(
        None,
        description=(
            "What has equal weight in the loss: each token, each sequence, or each token with every sequence "
            "divided by `gconfig.max_new_tokens` (`constant`); null: set by the algorithm."
        ),
    )
    overlong_penalty_factor: Annotated[float | None, _OWN_LOSS] = Field(
        None, ge=0, description="Maximum penalty of an overlong response (DAPO); null: set by the algorithm."
    )
    overlong_tokens: Annotated[int | None, _OWN_LOSS, _NO_OVERLONG] = Field(
        None,
        ge=1,
        description=(
            "Number of tokens before `gconfig.max_new_tokens` over which the penalty grows from 0; null: a fifth of it."
        ),
    )
    dynamic_sampling: Annotated[bool | None, _OWN_LOSS] = Field(
        None,
        description="Replace groups whose rewards are all equal by new ones (DAPO); null: set by the algorithm.",
    )
    max_dropped_groups: Annotated[int, _NOT_DROPPED] = Field(
        64,
        ge=0,
        description="Maximum consecutive groups that are replaced; the next one is kept, and the count restarts.",
    )
    skip_zero_advantages: Annotated[bool | None, _OWN_LOSS, _MORE_THAN_ADVANTAGES] = Field(
        None,
        description=(
            "Exclude responses whose advantages are all 0 from the training pass. The gradient stays the same "
            "except for expert load balancing; entropy and KL statistics cover the remaining responses. null: "
            "false."
        ),
    )
    dpo_beta: Annotated[float, _NOT_DPO] = Field(0.1, gt=0, description="Inverse temperature β of `algorithm: dpo`.")


class SchedulingStrategyConfig(Section):
    """Placement of a role."""

    type: Annotated[Literal["colocation", "separation"], _PLACED] = Field(
        "colocation", description="`colocation`: on the GPUs of `target`; `separation`: on GPUs of its own."
    )
    target: Annotated[Literal["actor", "rollout"], _SEPARATE] = Field(
        "actor", description="Role whose GPUs are shared."
    )


class RoleConfig(Section):
    """A model beside the actor, on trainer ranks of its own. null means the actor's value."""

    backend: str | None = Field(
        None,
        description=(
            "Layout, such as `megatron:t2`; null: from `allocation_mode`, else the actor's layout on the actor's GPUs."
        ),
    )
    scheduling_strategy: SchedulingStrategyConfig = Field(
        SchedulingStrategyConfig(), description="Placement of `backend`, unless it names GPUs with `@`."
    )
    path: Annotated[str | None, PATH] = Field(
        None, description="Model in Hugging Face form: a directory or a name on the hub; null: the actor's."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Data type of weights and activations; null: the actor's."
    )
    mb_spec: MicroBatchConfig | None = Field(None, description="Micro-batches; null: the actor's.")
    megatron: Annotated[MegatronConfig | None, _NOT_MEGATRON] = Field(
        None, description="Megatron settings; null: the actor's."
    )
    fsdp: Annotated[FSDPConfig | None, _NOT_FSDP] = Field(None, description="FSDP settings; null: the actor's.")
    offload: Annotated[bool | None, CPU] = Field(
        None, description="Keep the model in host memory between calls; null: the actor's setting."
    )
    env_vars: Annotated[dict[str, str] | None, _TEXTS] = Field(
        None, description="Environment variables of the ranks; null: the actor's."
    )
    timeout_s: float | None = Field(None, gt=0, description="Maximum seconds of one call; null: the actor's.")


class ReferenceConfig(RoleConfig):
    """The reference policy: computes log-probs and is not trained."""

    update_every_steps: int | None = Field(
        None,
        ge=1,
        description="Training steps between updates of the reference from the actor; null: the reference is fixed.",
    )
    ema_decay: Annotated[float, ignored_if("ref.update_every_steps", None)] = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of itself that the reference keeps in an update (exponential moving average); 0: it becomes "
            "the actor. In bfloat16, changes below 1/256 of a weight are lost."
        ),
    )


class CriticConfig(RoleConfig):
    """The critic: the model with a value head and an optimizer of its own."""

    optimizer: OptimizerConfig | None = Field(None, description="The optimizer; null: the actor's settings.")
    eps_clip: float = Field(
        0.5, gt=0, description="Clip range of a value around its value before the step, in units of reward."
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Training steps that train only the critic, before the actor is trained too.",
    )


class WarmStartConfig(Section):
    """Supervised training on reference answers before reinforcement learning, with the same engine."""

    steps: int = Field(ge=1, description="Maximum optimizer steps.")
    batch_size: int = Field(256, ge=1, description="Problems per optimizer step.")
    lr: float = Field(2e-3, gt=0, description="Constant learning rate.")
    target_reward: float = Field(1.0, gt=0, le=1, description="Stop when the evaluation reward reaches this.")
    check_every: int = Field(25, ge=1, description="Optimizer steps between two evaluations.")
