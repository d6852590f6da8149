"""Training: `actor`, `ref`, `critic` and `warm_start`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

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


class InitModelConfig(Section):
    """A Qwen3 shape with random weights, written in Hugging Face form at the start of the run."""

    tokenizer: Literal["arithmetic", "bytes"] = Field(
        "arithmetic", description="`arithmetic`: the generated problems' words and single digits; `bytes`: any text."
    )
    vocab_size: int | None = Field(
        None, ge=1, description="Rows of the embedding; null: as many as the tokenizer has entries."
    )
    hidden_size: int = Field(128, ge=8, description="Width of the residual stream.")
    num_hidden_layers: int = Field(3, ge=1, le=10**4, description="Number of layers.")
    num_attention_heads: int = Field(4, ge=1, description="Query heads.")
    num_key_value_heads: int = Field(2, ge=1, description="Key and value heads (GQA groups).")
    head_dim: int = Field(32, ge=2, description="Width of one head; even.")
    intermediate_size: int = Field(384, ge=1, description="Width of the dense feed-forward layer.")
    max_position_embeddings: int = Field(512, ge=1, description="Longest sequence, in tokens.")
    tie_word_embeddings: bool = Field(
        True, description="Share the input embedding with the output layer; has to be false with experts."
    )
    num_experts: int | None = Field(None, ge=2, description="Experts per layer (Qwen3-MoE); null: a dense model.")
    num_experts_per_tok: int = Field(2, ge=1, description="Experts that each token is routed to.")
    moe_intermediate_size: int = Field(128, ge=1, description="Width of one expert's feed-forward layer.")


class MicroBatchConfig(Section):
    """How a batch is cut into micro-batches."""

    max_tokens_per_mb: int = Field(
        16384,
        ge=1,
        description="Most tokens in one packed micro-batch of a data-parallel rank, over its CP ranks.",
    )
    share_prompts: bool = Field(
        False,
        description="Whether a prompt is computed once for all of its samples in a micro-batch, with the same gradients."
        " Not under Megatron's context parallelism.",
    )


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    type: Literal["adam"] = Field("adam", description="`adam`: AdamW with decoupled weight decay.")
    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    gradient_clipping: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Shape of the learning rate after warm-up, over the run's steps."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps in which the learning rate rises linearly from 0.")
    warmup_steps_proportion: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="`warmup_steps` as a share of the run's optimizer steps; the larger of both counts.",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of `lr`.")
    max_skipped_steps: int = Field(
        3,
        ge=0,
        description="Optimizer steps in a row that may be skipped because the gradient is not finite; one more ends the "
        "run.",
    )

    def warmup(self, total_steps: int) -> int:
        """Return the optimizer steps of the warm-up in a run of so many."""
        return max(self.warmup_steps, int(self.warmup_steps_proportion * total_steps))


class MegatronConfig(Section):
    """Settings of the Megatron trainer; parallel sizes come from the allocation alone."""

    bridge_type: Literal["mbridge", "megatron-bridge"] = Field(
        "mbridge", description="Library that converts weights between Hugging Face and Megatron names."
    )
    use_deterministic_algorithms: bool = Field(
        False, description="Bitwise reproducible kernels only, at some loss of speed."
    )
    use_distributed_optimizer: bool = Field(
        True, description="Shard the optimizer's state over the data-parallel ranks."
    )
    use_dist_checkpointing: bool = Field(
        False,
        description="Start from `dist_checkpointing_path` instead of the weights in `path`, which may have none then.",
    )
    dist_checkpointing_path: Annotated[str | None, PATH] = Field(
        None,
        description="Megatron distributed checkpoint of any layout, such as `areal-like convert-checkpoint` makes.",
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None, description="Activations to recompute in the backward pass; null: none."
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="How layers are chosen; goes with `recompute_granularity: full`."
    )
    recompute_num_layers: int | None = Field(
        None, ge=1, description="Layers per recomputed unit (`uniform`) or recomputed layers (`block`)."
    )
    recompute_modules: list[RecomputedModule] | None = Field(
        None, description="What `recompute_granularity: selective` recomputes; null: `core_attn`."
    )
    moe_layer_recompute: bool = Field(
        False, description="Recompute the experts' layers in the backward pass: `moe` of `recompute_modules`."
    )
    moe_token_dispatcher_type: Literal["alltoall", "flex", "allgather"] = Field(
        "alltoall",
        description="How tokens reach the ranks of their experts; `flex` is DeepEP. `allgather` is refused: it takes equally "
        "long micro-batches only.",
    )
    moe_grouped_gemm: bool = Field(
        True,
        description="Compute the experts of a rank in one call; false, one after another, goes with `bridge_type: "
        "megatron-bridge`.",
    )
    overlap_grad_reduce: bool | None = Field(
        None,
        description="Reduce gradients over data-parallel ranks while more are computed; null: on GPUs, where there are such "
        "ranks.",
    )
    overlap_param_gather: bool = Field(
        False,
        description="Gather updated weights while the next forward pass begins; with `use_distributed_optimizer` and "
        "`overlap_grad_reduce`.",
    )
    param_offload: bool = Field(
        False, description="Keep weights in host memory, except while they are computed with, sent or saved."
    )
    grad_offload: bool = Field(False, description="Free the gradients' memory, except in forward and backward passes.")
    optimizer_offload: bool = Field(
        False,
        description="Keep the optimizer's state, float32 weights among it, in host memory, except while the optimizer steps "
        "and while it is saved.",
    )
    use_precision_aware_optimizer: bool = Field(
        False,
        description="Let the distributed optimizer keep the four below in fewer bits (Transformer Engine's Adam, on GPUs).",
    )
    main_params_dtype: Literal["float32", "float16"] = Field(
        "float32", description="Data type of its weights, in which steps add up."
    )
    main_grads_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of the gradients that it takes, and in which they are reduced."
    )
    exp_avg_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Data type of its first moment."
    )
    exp_avg_sq_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Data type of its second moment."
    )
    override_transformer_config: dict[str, Any] = Field(
        {},
        description="Further fields of Megatron-core's TransformerConfig, by name. Unknown names are refused, and so is"
        " what TransformerConfig does not take, which is tried before start.",
    )


class FSDPConfig(Section):
    """Settings of the FSDP trainer."""

    gradient_checkpointing: bool = Field(False, description="Recompute each layer's activations in the backward pass.")
    offload_params: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in host memory; nothing on CPU."
    )


class NormConfig(Section):
    """What values are compared with: less their mean, in their standard deviations."""

    mean_level: Literal["group", "batch"] | None = Field(
        None, description="Values whose mean is subtracted: those of the prompt's group or of the step; null: none."
    )
    mean_leave1out: bool = Field(False, description="Leave a value out of the mean that it is compared with.")
    std_level: Literal["group", "batch"] | None = Field(
        None, description="Values whose standard deviation divides; null: none."
    )
    std_unbiased: bool = Field(
        False, description="Divide the squared distances of n values by n - 1 instead of n in that standard deviation."
    )


class EngineConfig(Section):
    """A model on trainer ranks: what every role of a run that computes one has."""

    backend: str | None = Field(None, description="Layout of the trainer, such as `megatron:d2`.")
    path: Annotated[str | None, PATH] = Field(
        None, description="Model in Hugging Face form: a directory or a name on the hub."
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Data type of weights and activations.")
    mb_spec: MicroBatchConfig = Field(MicroBatchConfig(), description="How a batch is cut into micro-batches.")
    megatron: MegatronConfig = Field(MegatronConfig(), description="Settings of the Megatron trainer.")
    fsdp: FSDPConfig = Field(FSDPConfig(), description="Settings of the FSDP trainer (`backend: fsdp:d4`).")
    offload: bool = Field(
        False,
        description="Keep weights, gradients and optimizer state in host memory while nothing is asked of the role: each call "
        "has on the GPU what it needs (`param_offload`, `grad_offload` and `optimizer_offload`, on any backend).",
    )
    env_vars: Annotated[dict[str, str], _TEXTS] = Field(
        {},
        description="Further environment variables of the ranks, such as `NVTE_FUSED_ATTN`; they come before the run's.",
    )
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Longest time for one call of the trainer, such as loading, a step or a save, in seconds.",
    )


class ActorConfig(EngineConfig):
    """The policy that is trained."""

    init_model: InitModelConfig | None = Field(None, description="Start from random weights instead of `path`.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="The optimizer.")
    use_lora: bool = Field(
        False, description="Train low-rank adapters beside the weights, which stay as they are (see [LoRA](lora.md))."
    )
    peft_type: Literal["lora"] = Field("lora", description="Kind of adapter.")
    lora_rank: int = Field(32, ge=1, description="Rank of each adapter.")
    lora_alpha: int = Field(16, ge=1, description="What adapters add counts `lora_alpha / lora_rank` times.")
    target_modules: list[str] = Field(
        [ALL_LINEAR],
        min_length=1,
        description="Linear layers that get an adapter, by the last part of their Hugging Face names, such as `q_proj`; "
        "`all-linear`: all but the output layer.",
    )
    ppo_n_minibatches: int = Field(1, ge=1, description="Optimizer steps per training step.")
    eps_clip: float | None = Field(
        None, gt=0, le=1, description="Clip range of the probability ratio below: 1 - eps_clip; null: the algorithm's."
    )
    eps_clip_higher: float | None = Field(
        None,
        gt=0,
        description="Clip range above: 1 + eps_clip_higher; null: the algorithm's, or `eps_clip` where that is set.",
    )
    c_clip: float | None = Field(
        None,
        gt=1,
        description="Dual clip: a negative advantage counts at most this many times; null: the algorithm's.",
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        None,
        description="Whether the clipped ratio is a token's, or the geometric mean over its sequence (GSPO); null: the "
        "algorithm's.",
    )
    use_decoupled_loss: bool | None = Field(
        None,
        description="Clip against the weights that the step starts from, and weight by their distance from those that "
        "generated (decoupled PPO); false: clip against those that generated; null: the algorithm's.",
    )
    behave_imp_weight_mode: BehaviourMode | None = Field(
        None,
        description="The behaviour weight (proximal over behaviour probability) of a token, of its sequence, or that "
        "one's geometric mean over tokens, which is limited to the cap or 0 beyond it; null: the algorithm's.",
    )
    behave_imp_weight_cap: float | None = Field(
        None, ge=1, description="Cap of the behaviour weight; null: the algorithm's."
    )
    entropy_coeff: float | None = Field(
        None, ge=0, description="Weight of the entropy bonus in the loss; null: the algorithm's."
    )
    kl_ctl: float | None = Field(
        None,
        ge=0,
        description="Weight of the KL divergence from `ref` in the reward of each token; null: the algorithm's.",
    )
    kl_loss_coef: float | None = Field(
        None, ge=0, description="Weight of the KL divergence from `ref` in the loss; null: the algorithm's."
    )
    kl_estimator: KLEstimator | None = Field(
        None, description="Estimator of that divergence; null: k1 in the reward, k3 in the loss."
    )
    reward_scaling: float = Field(
        1.0, gt=0, description="Factor of rewards, after `reward_bias` and before their norm."
    )
    reward_bias: float = Field(0.0, description="Added to rewards before `reward_scaling`.")
    reward_clip: float | None = Field(
        None, gt=0, description="Largest absolute reward after `reward_scaling`; null: not clipped."
    )
    reward_norm: NormConfig | None = Field(
        None, description="How rewards are normalised; null: as the algorithm does it."
    )
    adv_norm: NormConfig | None = Field(
        None, description="How advantages are normalised, over tokens; null: as the algorithm does it."
    )
    discount: float | None = Field(
        None, gt=0, le=1, description="Discount of later rewards per token; null: the algorithm's."
    )
    gae_lambda: float | None = Field(
        None, ge=0, le=1, description="λ of generalised advantage estimation; null: the algorithm's."
    )
    loss_agg_mode: Literal["token_mean", "sequence_mean", "constant"] | None = Field(
        None,
        description="What counts the same in the loss: each token, each sequence, or each token with "
        "`gconfig.max_new_tokens` as the length that all sequences are divided by; null: the algorithm's.",
    )
    overlong_penalty_factor: float | None = Field(
        None, ge=0, description="Largest reward that an overlong response loses (DAPO); null: the algorithm's."
    )
    overlong_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens before `gconfig.max_new_tokens` in which that penalty grows from 0; null: a fifth of it.",
    )
    dynamic_sampling: bool | None = Field(
        None,
        description="Generate other groups instead of those whose rewards are all equal (DAPO); null: the algorithm's.",
    )
    max_dropped_groups: int = Field(
        64, ge=0, description="Most such groups in a row that are replaced; the next ones are kept."
    )
    skip_zero_advantages: bool | None = Field(
        None,
        description="Leave responses whose advantages are all 0, as in a group of equal rewards, out of the training "
        "pass: it is shorter, and has the same gradient but for experts' load balancing. Statistics such as entropy and "
        "kl are then those of the others; null: false.",
    )
    dpo_beta: float = Field(0.1, gt=0, description="Inverse temperature β of `algorithm: dpo`.")


class SchedulingStrategyConfig(Section):
    """Whose GPUs a role runs on."""

    type: Literal["colocation", "separation"] = Field(
        "colocation", description="`colocation`: on the GPUs of `target`; `separation`: on GPUs of its own."
    )
    target: Literal["actor", "rollout"] = Field("actor", description="The role whose GPUs are shared.")


class RoleConfig(Section):
    """A model beside the actor, on trainer ranks of its own. What is null is as the actor has it."""

    backend: str | None = Field(
        None,
        description="Layout, such as `megatron:t2`; null: that in `allocation_mode`, else the actor's on its GPUs.",
    )
    scheduling_strategy: SchedulingStrategyConfig = Field(
        SchedulingStrategyConfig(), description="Where `backend` is placed, unless it names GPUs with `@`."
    )
    path: Annotated[str | None, PATH] = Field(
        None, description="Model in Hugging Face form: a directory or a name on the hub; null: the actor's."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Data type of weights and activations; null: the actor's."
    )
    mb_spec: MicroBatchConfig | None = Field(
        None, description="How a batch is cut into micro-batches; null: as for the actor."
    )
    megatron: MegatronConfig | None = Field(None, description="Settings of the Megatron trainer; null: the actor's.")
    fsdp: FSDPConfig | None = Field(None, description="Settings of the FSDP trainer; null: the actor's.")
    offload: bool | None = Field(
        None, description="Keep it all in host memory while nothing is asked of the role; null: as for the actor."
    )
    env_vars: Annotated[dict[str, str] | None, _TEXTS] = Field(
        None, description="Further environment variables of the ranks; null: the actor's."
    )
    timeout_s: float | None = Field(
        None, gt=0, description="Longest time for one call of the role, in seconds; null: the actor's."
    )


class ReferenceConfig(RoleConfig):
    """The reference policy, which gives log-probs and is not trained."""

    update_every_steps: int | None = Field(
        None, ge=1, description="Training steps between two updates of the reference by the actor; null: it is fixed."
    )
    ema_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of itself that the reference keeps in an update, the rest is the actor's (exponential moving "
        "average); 0: it becomes the actor. In bfloat16 changes below 1/256 of a weight are lost.",
    )


class CriticConfig(RoleConfig):
    """The critic, which estimates values: the model with a value head, trained by an optimizer of its own."""

    optimizer: OptimizerConfig | None = Field(None, description="The optimizer; null: as for the actor.")
    eps_clip: float = Field(
        0.5, gt=0, description="Clip range of a value around the one before the step, in units of reward."
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Training steps in which the critic alone is trained, before those that train the actor too.",
    )


class WarmStartConfig(Section):
    """Supervised training on reference answers before reinforcement learning, through the same engine."""

    steps: int = Field(ge=1, description="Most optimizer steps.")
    batch_size: int = Field(256, ge=1, description="Problems per optimizer step.")
    lr: float = Field(2e-3, gt=0, description="Learning rate, constant.")
    target_reward: float = Field(1.0, gt=0, le=1, description="Stop as soon as held-out reward reaches this.")
    check_every: int = Field(25, ge=1, description="Optimizer steps between two held-out evaluations.")
