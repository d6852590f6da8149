"""Everything a run can be told, as one typed tree; imports neither torch nor the engine.

Names follow AReaL's published configuration where one exists. Every field states its unit; a rule that spans
several fields lives in `preflight/`, so that all of its findings come together.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

type TrainerRole = Literal["actor", "ref", "critic"]

LEAST_TEMPERATURE = 1e-6  # below this SGLang is greedy, and gives the log-probs of temperature 1
_LONGEST_NAME, _LONGEST_PATH = 255, 2048  # bytes; a path has room for a run's own names below it
SINGLE_TURN = "single_turn"  # the built-in workflow
ALL_LINEAR = "all-linear"  # of actor.target_modules
SERVER_RESERVE = 8  # positions of its context that SGLang does not give to a request (it needs 2 to 6)

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


def _path(path: str | None) -> str | None:
    """A path with `~` replaced by the home directory; names without it, such as `owner/name`, as they are."""
    if path is None:
        return None
    if not path.isprintable():
        raise ValueError("a path of printable characters")
    path = os.path.expanduser(path)
    if len(path.encode()) > _LONGEST_PATH or any(len(name.encode()) > _LONGEST_NAME for name in path.split("/")):
        raise ValueError(f"a path of at most {_LONGEST_PATH} bytes, each name in it of at most {_LONGEST_NAME}")
    return path


def _name(name: str) -> str:
    """The name of a directory."""
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"at most {_LONGEST_NAME} bytes, which is what file systems take")
    return name


def _template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Variables of a chat template, without those that a run gives it."""
    if taken := {"messages", "tools", "chat_template", "add_generation_prompt"} & variables.keys():
        raise ValueError(f"variables of the template without {', '.join(sorted(taken))}, which the run gives it")
    return variables


PATH = AfterValidator(_path)
NAME = AfterValidator(_name)


class Section(BaseModel):
    """One node of the tree: immutable, unknown keys refused, no silent conversion between types, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClusterConfig(Section):
    """The machines a run may use and where its files go."""

    n_nodes: int = Field(1, ge=1, description="Number of nodes.")
    n_gpus_per_node: int = Field(8, ge=1, description="GPUs per node; on a CPU machine, process slots per node.")
    fileroot: Annotated[str, PATH] = Field(
        "runs", description="Directory that holds all runs: `fileroot/experiment_name/trial_name` is this one's."
    )


class SchedulerConfig(Section):
    """Which Ray cluster starts and places the workers."""

    type: Literal["local", "ray"] = Field(
        "local",
        description="`local`: a private Ray cluster on loopback that ends with the run; `ray`: an existing one.",
    )
    address: str = Field(
        "auto", description="Address of the existing cluster (`type: ray`); `auto` asks RAY_ADDRESS, then this host."
    )
    startup_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait for Ray's grant, then for every worker's process, in seconds."
    )
    cache_dir: str | None = Field(
        "~/.cache/areal_like",
        description="Directory of every host where trainer ranks and servers keep compiled kernels from run to run: those of "
        "torch, Triton, FlashInfer, DeepGEMM and CUDA. Variables that are set already, such as `TRITON_CACHE_DIR`, count "
        "more. null: each library's own place, of which torch's ends with the run.",
    )


class ArithmeticConfig(Section):
    """The generated word problems of `path: arithmetic`."""

    max_number: int = Field(20, ge=2, le=999, description="Largest operand.")
    size: int = Field(8192, ge=1, le=10**7, description="Number of problems.")
    seed: int = Field(0, ge=0, description="Seed of the generator; train and test never share a question.")


class SourceConfig(Section):
    """Rows, and how a prompt is made of one. All of its columns reach reward and workflow."""

    path: Annotated[str, PATH] = Field(
        description="A JSONL or Parquet file, a Hugging Face dataset name such as `openai/gsm8k`, `arithmetic`, or "
        "`my_data.py:rows`: an object with `__len__` and `__getitem__`, or a function that returns one."
    )
    name: str | None = Field(None, description="Configuration of a Hugging Face dataset, such as `main`.")
    split: str = Field("train", description="Split of a Hugging Face dataset; `train` or `test` of `arithmetic`.")
    prompt_field: str = Field(
        "question",
        description="Field that holds the problem: text, or a list of messages (`role`, `content`). Dots reach into "
        "nested fields.",
    )
    answer_field: str = Field(
        "answer",
        description="Field that holds the reference answer, such as `reward_model.ground_truth`; needed where the "
        "reward has a `type`.",
    )
    system_prompt: str | None = Field(
        None, description="System message of prompts that have none; null: none. It makes a conversation of a text."
    )
    tools: list[dict[str, Any]] = Field(
        [], description="Tools that the chat template is given, as JSON schemas in OpenAI's form."
    )
    tools_field: str | None = Field(None, description="Field with a row's own tools, in place of `tools`; null: none.")
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] = Field(
        {}, description="Variables of the chat template, such as `enable_thinking: false`."
    )
    arithmetic: ArithmeticConfig = Field(ArithmeticConfig(), description="Settings of `path: arithmetic`.")


class DatasetConfig(SourceConfig):
    """Where prompts come from and how long they may be."""

    max_prompt_length: int = Field(1024, ge=1, description="Longest prompt, in tokens.")
    overlong_prompts: Literal["refuse", "drop", "truncate"] = Field(
        "refuse",
        description="What is done with longer ones. `refuse`: the run does not start; `drop`: their rows are left out; "
        "`truncate`: their last `max_prompt_length` tokens are kept. How many, a warning says.",
    )


class MixtureConfig(SourceConfig):
    """A further set of prompts."""

    weight: float = Field(1.0, gt=0, description="Share of the prompts, relative to the weights of the others.")


class TrainDatasetConfig(DatasetConfig):
    """The prompts that are trained on."""

    batch_size: int = Field(64, ge=1, description="Prompts per training step; each gives `gconfig.n_samples` samples.")
    shuffle: bool = Field(True, description="Visit the prompts in a new seeded order every epoch.")
    mixture: dict[str, MixtureConfig] = Field(
        {}, description="Further sets by name, drawn from beside `path`'s by their `weight`."
    )
    weight: float = Field(1.0, gt=0, description="Share of the prompts of `path`, relative to those of `mixture`.")

    @property
    def weights(self) -> dict[str, float] | None:
        """The weight of each set by its name, "" for `path`'s; None where there is only that."""
        further = {name: source.weight for name, source in self.mixture.items()}
        return {"": self.weight, **further} if further else None


class ValidDatasetConfig(DatasetConfig):
    """The held-out prompts that are only evaluated on."""

    split: str = Field("test", description="Split of a Hugging Face dataset; `train` or `test` of `arithmetic`.")
    max_samples: int | None = Field(None, ge=1, description="Evaluate on the first this many prompts; null: on all.")
    workflow: str | None = Field(
        None,
        description="Workflow that this set is evaluated with, as `workflow` names one; `single_turn`: the built-in one; "
        "null: the run's.",
    )


class GenerationConfig(Section):
    """How responses are sampled during training."""

    n_samples: int = Field(8, ge=1, description="Responses per prompt: the group that advantages are normalised over.")
    max_new_tokens: int = Field(512, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(
        1.0, ge=LEAST_TEMPERATURE, description="Softmax temperature; the trainer scales its log-probs the same way."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus: share of the probability mass that is sampled from; only 1, or log-probs would be wrong.",
    )


class JudgeConfig(Section):
    """What judges a response: a function of the user's, a shipped verifier, or the reward model."""

    type: Literal["gsm8k", "model"] = Field(
        "gsm8k",
        description="`gsm8k`: 1 if the final answer equals the reference, else 0. `model`: the score of `reward.model`. "
        "Counts without `function`.",
    )
    function: str | None = Field(
        None, description="Own function, `my_rewards.py:score` or `package.module:score`, which takes (response, row)."
    )


class RewardPartConfig(JudgeConfig):
    """One of several rewards."""

    weight: float = Field(1.0, description="Factor of this part in the sum.")


class RewardModelConfig(Section):
    """A reward model: a Hugging Face sequence classifier with one label, on SGLang servers of its own."""

    path: Annotated[str, PATH] = Field(description="The classifier: a directory or a name on the hub.")
    backend: str | None = Field(
        None, description="Layout of its servers, such as `sglang:d2`; null: that of `reward` in `allocation_mode`."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Data type of weights and activations; null: the actor's."
    )
    timeout_s: float = Field(
        300.0, gt=0, description="Longest time to score one response, in seconds; then it is missing."
    )


class RewardConfig(JudgeConfig):
    """How a response is judged."""

    parts: dict[str, RewardPartConfig] = Field(
        {},
        description="Several rewards by name, in place of `type` and `function`: each has one of these and a `weight`, "
        "and the reward is their weighted sum.",
    )
    model: RewardModelConfig | None = Field(None, description="The model of `type: model`.")
    timeout_s: float = Field(
        10.0, gt=0, description="Longest time to judge one response, in seconds; then it is missing."
    )
    workers: int | None = Field(
        None, ge=1, le=256, description="Processes that judge, each one response at a time; null: one per core."
    )
    max_missing_batches: int = Field(
        3,
        ge=0,
        description="Batches in a row that may be skipped because none of their responses could be judged; one more ends "
        "the run.",
    )


class EpisodeConfig(Section):
    """The limits of one episode of `workflow`, and how many may fail."""

    max_turns: int = Field(16, ge=1, description="Most completions of one episode; a further one is refused.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest trajectory of an episode, in tokens, with prompts and tool output; null: max_prompt_length "
        "+ gconfig.max_new_tokens, the longest of a single turn. `gconfig.max_new_tokens` bounds each turn.",
    )
    timeout_s: float = Field(600.0, gt=0, description="Longest time of one episode, in seconds; then it has failed.")
    max_failed_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the latest batch of episodes that may fail, by whatever cause; beyond it the run ends.",
    )
    endpoint: bool = Field(
        False,
        description="Answer an episode's requests on a port of loopback too, for agents in processes of their own: "
        "`client.base_url` and `client.api_key` work there.",
    )
    tool_call_parser: str | None = Field(
        None,
        description="SGLang's name for how the model family writes tool calls, such as `qwen25`; null: requests with tools "
        "are refused.",
    )


class InitModelConfig(Section):
    """A Qwen3 shape with random weights, written in Hugging Face form at the start of the run."""

    tokenizer: Literal["arithmetic", "bytes"] = Field(
        "arithmetic", description="`arithmetic`: the generated problems' words and single digits; `bytes`: any text."
    )
    vocab_size: int | None = Field(
        None, ge=1, description="Rows of the embedding; null: as many as the tokenizer has entries."
    )
    hidden_size: int = Field(128, ge=8, description="Width of the residual stream.")
    num_hidden_layers: int = Field(3, ge=1, description="Number of layers.")
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
        16384, ge=1, description="Most tokens in one packed micro-batch of a data-parallel rank, over its CP ranks."
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
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate as a share of `lr`.")
    max_skipped_steps: int = Field(
        3,
        ge=0,
        description="Optimizer steps in a row that may be skipped because the gradient is not finite; one more ends the "
        "run.",
    )


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
        {}, description="Further fields of Megatron-core's TransformerConfig, by name; unknown names are refused."
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
    env_vars: dict[str, str] = Field(
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
    env_vars: dict[str, str] | None = Field(
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


class RolloutConfig(Section):
    """How many responses are in flight and how old they may grow."""

    backend: str | None = Field(None, description="Layout of the servers, such as `sglang:d4t4`: 4 servers of 4 GPUs.")
    max_head_offpolicyness: int = Field(
        0, ge=0, description="Staleness bound η in weight versions, kept for every trajectory; 0 is synchronous."
    )
    sharing: Literal["resident", "alternate"] = Field(
        "resident",
        description="How servers share GPUs with the trainer, where the layout has them do so. `resident`: both stay on "
        "them; `alternate`: they take turns, and the other one's memory is free (`weight_update.requests` says what becomes "
        "of requests that run then).",
    )
    max_concurrent_rollouts: int | None = Field(
        None, ge=1, description="Most samples in flight; null: as many as the staleness bound admits."
    )
    oversampling: float = Field(
        0.0,
        ge=0,
        le=4,
        description="Groups that run beyond what the staleness bound needs, as a share of `train_dataset.batch_size`. A step "
        "takes the groups that finish first, and as many that are unfinished are cancelled for others. This saves the wait "
        "for the longest responses and biases what is trained towards short ones: prompts with long responses are trained "
        "less often than the dataset has them. 0: every prompt that was started is trained.",
    )
    prefill_once: bool = Field(
        True,
        description="Send a group's other samples when the first has begun, so that they share its prompt; false: at "
        "once, as for prompts of less than 64 tokens.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest time that a server may do nothing while it has requests, in seconds."
    )
    startup_timeout_s: float = Field(600.0, gt=0, description="Longest wait until every server is ready, in seconds.")
    max_restarts: int = Field(
        3,
        ge=0,
        description="Starts, in the whole run, of servers that died or hung; one death more ends the run.",
    )
    min_servers: int = Field(
        1, ge=1, description="Servers that have to be left for a run to go on while another one is started again."
    )
    max_logprob_diff: float | None = Field(
        None,
        gt=0,
        description="Largest mean distance between the trainer's and the servers' log-probs of the same responses at "
        "version 0; beyond it the run ends before its first step; null: 0.001 in float32, 0.1 in bfloat16.",
    )

    @property
    def alternates(self) -> bool:
        """Whether trainer and servers take turns on GPUs."""
        return self.sharing == "alternate"


class SGLangConfig(Section):
    """Settings of each SGLang server; device, data type and tensor parallel size come from the run."""

    mem_fraction_static: float = Field(
        0.8, gt=0, lt=1, description="Share of a GPU's memory for weights and KV cache; unused on CPU."
    )
    context_length: int | None = Field(
        None, ge=1, description="Positions of the server's context, in tokens; null: as many as the run needs."
    )
    attention_backend: str | None = Field(
        None, description="SGLang's attention kernels, such as `triton`; null: SGLang's choice (torch_native on CPU)."
    )
    max_running_requests: int | None = Field(
        None, ge=1, description="Most requests a server decodes at once; null: SGLang's choice."
    )
    deterministic: bool = Field(
        False,
        description="Samples depend on `seed` and weights alone, not on what shares their batch; slower, and not on CPU.",
    )
    port: int | None = Field(
        None, ge=1024, le=65535, description="Port of the first server, the next ones follow; null: free ports."
    )
    extra_args: dict[str, bool | int | float | str] = Field(
        {},
        description="Further `sglang.launch_server` options by name, such as `schedule_policy: lpm`; only what works with weight updates.",
    )


class WeightUpdateConfig(Section):
    """How new weights reach the servers."""

    mode: Literal["disk", "collective", "ipc"] = Field(
        "collective",
        description="`disk`: a checkpoint that servers read; `collective`: broadcast (nccl; gloo on CPU, and where trainer "
        "and servers share GPUs); `ipc`: servers read out of the memory of the trainer on the same GPUs.",
    )
    requests: Literal["in_place", "recompute", "drain"] = Field(
        "in_place",
        description="What becomes of running requests. `in_place`: they go on under the new weights with the keys and "
        "values that they have; `recompute`: these are made anew by the new weights; `drain`: the update waits for them.",
    )
    timeout_s: float = Field(300.0, gt=0, description="Longest time until every server has acknowledged, in seconds.")
    bucket_mb: int = Field(512, ge=1, description="Tensors sent at once, in MiB.")
    checksum: bool = Field(
        False,
        description="Compare a checksum of every tensor that a server was given with the trainer's, before the server goes "
        "on; the trainer gathers its weights once more for that.",
    )


class WarmStartConfig(Section):
    """Supervised training on reference answers before reinforcement learning, through the same engine."""

    steps: int = Field(ge=1, description="Most optimizer steps.")
    batch_size: int = Field(256, ge=1, description="Problems per optimizer step.")
    lr: float = Field(2e-3, gt=0, description="Learning rate, constant.")
    target_reward: float = Field(1.0, gt=0, le=1, description="Stop as soon as held-out reward reaches this.")
    check_every: int = Field(25, ge=1, description="Optimizer steps between two held-out evaluations.")


def _greedy_or_not(temperature: float | None) -> float | None:
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"0, which is greedy, or at least {LEAST_TEMPERATURE:g}")
    return temperature


TEMPERATURE = AfterValidator(_greedy_or_not)
_SET_NAME = StringConstraints(pattern=r"^\w[\w.-]*$", max_length=64)


class EvaluationConfig(ValidDatasetConfig):
    """One of several sets of held-out prompts; what is null here is the evaluator's."""

    n_samples: int | None = Field(None, ge=1, description="Responses per prompt; null: `evaluator.n_samples`.")
    temperature: Annotated[float | None, TEMPERATURE] = Field(
        None, ge=0, description="Softmax temperature, 0 is greedy; null: `evaluator.temperature`."
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest response, in tokens; null: `evaluator.max_new_tokens`."
    )


class EvaluatorConfig(Section):
    """When held-out prompts are evaluated, and how; `valid_dataset` is one set of them, `datasets` are further ones."""

    freq_steps: int | None = Field(None, ge=1, description="Training steps between two evaluations; null: none.")
    n_samples: int = Field(1, ge=1, description="Responses per prompt: the n of mean@n, and the largest k of pass@k.")
    temperature: Annotated[float, TEMPERATURE] = Field(
        0.0, ge=0, description="Softmax temperature of evaluation; 0 is greedy."
    )
    max_new_tokens: int | None = Field(
        None, ge=1, description="Longest response, in tokens; null: `gconfig.max_new_tokens`."
    )
    pass_reward: float = Field(1.0, description="A response passes, for pass@k, where its reward is at least this.")
    at_start: bool = Field(True, description="Evaluate before the first training step.")
    at_end: bool = Field(True, description="Evaluate after the last training step.")
    datasets: dict[Annotated[str, _SET_NAME], EvaluationConfig] = Field(
        {},
        description="Further sets by name: the keys of `valid_dataset`, and `n_samples`, `temperature` and "
        "`max_new_tokens` where they differ from the evaluator's.",
    )


class SaverConfig(Section):
    """When Hugging Face checkpoints are written; the last one always is."""

    freq_steps: int | None = Field(
        None, ge=1, description="Training steps between two checkpoints; null: only the last."
    )
    merge_lora: bool = Field(
        False, description="Write the whole model with its adapters added, beside the adapters (`actor.use_lora`)."
    )


class WandBConfig(Section):
    """Weights & Biases; its own variables say more, such as WANDB_API_KEY and WANDB_BASE_URL."""

    mode: Literal["disabled", "offline", "online"] = Field(
        "disabled", description="`offline`: into the run's directory, for `wandb sync`; `online`: to the server."
    )
    project: str | None = Field(None, description="Project; null: `experiment_name`.")
    entity: str | None = Field(None, description="User or team; null: wandb's default.")
    group: str | None = Field(None, description="Group of runs; null: none.")


class SwanLabConfig(Section):
    """SwanLab."""

    mode: Literal["disabled", "local", "offline", "cloud"] = Field(
        "disabled",
        description="`local`, `offline`: into the run's directory, to watch or to send later; `cloud`: sent.",
    )
    project: str | None = Field(None, description="Project; null: `experiment_name`.")
    workspace: str | None = Field(None, description="Workspace; null: swanlab's default.")


class MLflowConfig(Section):
    """MLflow."""

    tracking_uri: str | None = Field(
        None,
        description="Server or database, such as `http://localhost:5000` or `sqlite:///mlflow.db`; null: no MLflow.",
    )
    experiment_name: str | None = Field(None, description="Experiment; null: the run's `experiment_name`.")


class RecoverConfig(Section):
    """Checkpoints from which the same command goes on with a run that ended early."""

    mode: Literal["off", "auto", "fault"] = Field(
        "off",
        description="`off`: none are written, and a run's directory is never entered again; `auto`: the same command goes "
        "on with a run, whatever ended it; `fault`: only where a failure did, not the end of training or Ctrl-C.",
    )
    freq_steps: int | None = Field(
        None, ge=1, description="Training steps between two checkpoints; null: none for that."
    )
    freq_secs: float | None = Field(
        600.0, gt=0, description="Time between two checkpoints, in seconds; null: none for that. The last step has one."
    )
    keep: int = Field(2, ge=1, description="Checkpoints to keep: the last ones.")


class StatsLoggerConfig(Section):
    """Where the numbers of each step go."""

    wandb: WandBConfig = Field(WandBConfig(), description="Weights & Biases.")
    swanlab: SwanLabConfig = Field(SwanLabConfig(), description="SwanLab.")
    mlflow: MLflowConfig = Field(MLflowConfig(), description="MLflow.")
    tensorboard: bool = Field(True, description="Write TensorBoard events to the run's directory.")
    console: bool = Field(True, description="Print live progress and a table of steps.")
    console_samples: int = Field(
        2, ge=0, description="Responses that are printed at each evaluation of a set, from the worst to the best."
    )
    samples: int | None = Field(
        256,
        ge=0,
        description="Samples of each step and of each evaluation that are kept in `samples/`; null: all of them.",
    )
    report: bool = Field(True, description="Write `report.html` to the run's directory as the run goes on.")


class RunConfig(Section):
    """One run of asynchronous reinforcement learning."""

    experiment_name: Annotated[str, NAME] = Field(
        pattern=r"^\w[\w.-]*$", description="First part of the run's directory."
    )
    trial_name: Annotated[str, NAME] = Field(
        "",
        pattern=r"^(\w[\w.-]*)?$",
        description="Second part of the run's directory; empty: the time at which the run starts.",
    )
    seed: int = Field(1, ge=0, lt=2**32, description="Seed of weights, data order and sampling.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto`: CUDA where present, else CPU.")
    allocation_mode: str | None = Field(
        None, description="Layout of the whole run, such as `sglang:d1|megatron:d1`; null: each role's `backend`."
    )
    total_train_epochs: int = Field(1, ge=1, description="Passes over the training prompts.")
    total_train_steps: int | None = Field(None, ge=1, description="Stop after this many training steps; null: never.")
    algorithm: str = Field(
        "grpo",
        description="`grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_pp`, `gspo`, `cispo`, `ppo`, `dpo`, `sft`, or a function of "
        "yours, `my_file.py:make` or `package.module:make` (see [algorithms](algorithms.md)).",
    )
    tokenizer_path: Annotated[str | None, PATH] = Field(
        None, description="Tokenizer in Hugging Face form; null: the model's own."
    )

    cluster: ClusterConfig = Field(ClusterConfig(), description="The machines.")
    scheduler: SchedulerConfig = Field(SchedulerConfig(), description="The Ray cluster.")
    train_dataset: TrainDatasetConfig = Field(description="The prompts that are trained on.")
    valid_dataset: ValidDatasetConfig | None = Field(None, description="The held-out prompts.")
    gconfig: GenerationConfig = Field(GenerationConfig(), description="Sampling.")
    reward: RewardConfig = Field(RewardConfig(), description="Judging.")
    workflow: str | None = Field(
        None,
        description="Own workflow, `my_workflow.py:run` or `package.module:run`, with the parameters (row, client) or "
        "(prompt, n, rollout); null: a prompt, n samples, a reward for each.",
    )
    episode: EpisodeConfig = Field(EpisodeConfig(), description="Limits of an episode of `workflow`.")
    actor: ActorConfig = Field(description="The trainer.")
    ref: ReferenceConfig | None = Field(None, description="The reference policy; null: none.")
    critic: CriticConfig | None = Field(None, description="The critic; null: none.")
    rollout: RolloutConfig = Field(RolloutConfig(), description="The rollout.")
    sglang: SGLangConfig = Field(SGLangConfig(), description="The servers.")
    weight_update: WeightUpdateConfig = Field(WeightUpdateConfig(), description="The way of new weights.")
    warm_start: WarmStartConfig | None = Field(None, description="Supervised training first; null: none.")
    evaluator: EvaluatorConfig = Field(EvaluatorConfig(), description="Evaluation.")
    saver: SaverConfig = Field(SaverConfig(), description="Checkpoints.")
    recover: RecoverConfig = Field(RecoverConfig(), description="Going on with a run that ended early.")
    stats_logger: StatsLoggerConfig = Field(StatsLoggerConfig(), description="Logging.")

    @property
    def run_dir(self) -> Path:
        """Directory of everything this run writes: absolute, as every process has a working directory of its own."""
        return Path(self.cluster.fileroot).absolute() / self.experiment_name / self.trial_name

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the actor without its adapters, as an empty section asks for nothing else."""
        elsewhere = self.warm_start is not None or "ref" in (self.allocation_mode or "")
        return self.actor.use_lora and self.ref == ReferenceConfig() and not elsewhere

    @property
    def further_roles(self) -> Mapping[TrainerRole, RoleConfig]:
        """The sections of the roles on trainer ranks beside the actor, as far as the run has them."""
        ref = None if self.base_is_reference else self.ref
        sections: dict[TrainerRole, RoleConfig | None] = {"ref": ref, "critic": self.critic}
        return {role: section for role, section in sections.items() if section is not None}

    @property
    def roles(self) -> Mapping[TrainerRole, EngineConfig]:
        """The models on trainer ranks, the actor first, each with the actor's settings where it has none of its own.

        A role without `path` has the actor's model, and its weights where it names no checkpoint of its own.
        """
        engines: dict[TrainerRole, EngineConfig] = {"actor": self.actor}
        for role, section in self.further_roles.items():
            fields = {name: _own_or(section, self.actor, name) for name in EngineConfig.model_fields}
            own = section.megatron or MegatronConfig()
            start = own if section.path or own.use_dist_checkpointing else self.actor.megatron
            weights = {name: getattr(start, name) for name in ("use_dist_checkpointing", "dist_checkpointing_path")}
            engines[role] = EngineConfig(**{**fields, "megatron": fields["megatron"].model_copy(update=weights)})
        return engines

    def optimizer(self, role: TrainerRole) -> OptimizerConfig | None:
        """The role's optimizer; None for one that is not trained."""
        if role == "critic" and self.critic is not None:
            return self.critic.optimizer or self.actor.optimizer
        return self.actor.optimizer if role == "actor" else None

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its response, or of a trajectory of `workflow`."""
        if self.workflow is not None and self.episode.max_tokens is not None:
            return self.episode.max_tokens
        prompts = [self.train_dataset.max_prompt_length]
        if self.valid_dataset is not None:
            prompts.append(self.valid_dataset.max_prompt_length)
        return max(prompts) + self.gconfig.max_new_tokens

    @property
    def workflows(self) -> dict[str, str]:
        """The user's own workflows, by the keys that name them."""
        valid = self.valid_dataset.workflow if self.valid_dataset else None
        named: dict[str, str | None] = {"workflow": self.workflow, "valid_dataset.workflow": valid}
        named |= {
            f"evaluator.datasets.{name}.workflow": data.workflow for name, data in self.evaluator.datasets.items()
        }
        return {key: it for key, it in named.items() if it is not None and it != SINGLE_TURN}

    @property
    def evaluations(self) -> dict[str, EvaluationConfig]:
        """What is evaluated, by name, with every setting; `valid_dataset` under this name."""
        own: dict[str, ValidDatasetConfig | None] = {"valid_dataset": self.valid_dataset, **self.evaluator.datasets}
        common = {
            "n_samples": self.evaluator.n_samples,
            "temperature": self.evaluator.temperature,
            "max_new_tokens": self.evaluator.max_new_tokens or self.gconfig.max_new_tokens,
            "workflow": self.workflow or SINGLE_TURN,
        }
        return {
            name: EvaluationConfig.model_validate(common | data.model_dump(exclude_none=True))
            for name, data in own.items()
            if data is not None
        }

    @property
    def longest_generated(self) -> int:
        """Most tokens of a prompt and its response, those that are only evaluated included."""
        evaluated = (data.max_prompt_length + (data.max_new_tokens or 0) for data in self.evaluations.values())
        played = self.episode.max_tokens or 0 if self.workflows else 0
        return max(self.longest_sequence, *evaluated, played)

    @property
    def context_length(self) -> int:
        """Positions of a server's context, in tokens."""
        return self.sglang.context_length or self.longest_generated + SERVER_RESERVE


def _own_or(section: RoleConfig, actor: ActorConfig, name: str) -> Any:
    """A role's setting, or the actor's where it is null; but a role's layout is never taken for another's."""
    own = getattr(section, name)
    return getattr(actor, name) if own is None and name not in ("backend", "path") else own
