"""Settings of every trained role, and `warm_start`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from areal_like.core.config.ignored import CPU, Ignored
from areal_like.core.config.schema.backends import FSDPConfig, MegatronConfig
from areal_like.core.config.section import PATH, Section

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
    """Stop when the evaluation reward reaches this."""
    check_every: int = Field(25, ge=1)
    """Optimizer steps between two evaluations."""
