"""The policy: `actor`, and several adapters of it: `adapters`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from areal_like.core.config.added import takes_keys
from areal_like.core.config.ignored import Ignored, ignored_if, with_settings
from areal_like.core.config.schema.trainer import EngineConfig, InitModelConfig, OptimizerConfig
from areal_like.core.config.section import Section

ALL_LINEAR = "all-linear"  # of actor.target_modules
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
_OWN_LOSS = Ignored(
    "`algorithm` is `dpo` or `sft`, which have losses of their own", lambda at: at.run.algorithm in ("dpo", "sft")
)
_NOT_DPO = Ignored("`algorithm` is not `dpo`", lambda at: at.settings is not None or at.run.algorithm == "sft")
_ONE_MINIBATCH = with_settings(
    "a step has one optimizer step and the decoupled loss, whose clipped ratio is then 1",
    lambda run, settings: settings.use_decoupled_loss and not run.actor.repeats,
)
_NO_DUAL_CLIP = with_settings("only PPO's objective has a dual clip", lambda run, settings: settings.objective != "ppo")
_NO_CLIP = with_settings(
    "`sapo` and `topr` do not clip the ratio at a range", lambda run, settings: settings.objective in ("sapo", "topr")
)
_NO_GATE = with_settings("`algorithm` is not `sapo`", lambda run, settings: settings.objective != "sapo")
_NOT_DECOUPLED = with_settings("`use_decoupled_loss` is `false`", lambda run, settings: not settings.use_decoupled_loss)
_NO_BEHAVIOUR_WEIGHT = with_settings(
    "`behave_imp_weight_mode` is `disabled`", lambda run, settings: settings.behave_imp_weight_mode == "disabled"
)
_NO_KL = with_settings(
    "`kl_ctl` and `kl_loss_coef` are 0", lambda run, settings: not settings.kl_ctl and not settings.kl_loss_coef
)
_NO_CRITIC = with_settings("the algorithm has no critic", lambda run, settings: not settings.critic)
_NO_PROMPT_VALUES = Ignored(
    "`algorithm` is neither `single_rollout` nor your own",
    lambda at: at.run.algorithm != "single_rollout" and ":" not in at.run.algorithm,
)
_NO_TURNS = Ignored("no workflow of your own is set (`workflow`)", lambda at: "workflow" not in at.run.workflows)
_NOT_ALONE = with_settings(
    "`algorithm` is neither `gigpo` nor `turn_reinforce`", lambda run, settings: not settings.turns_alone
)
_NO_BRANCHES = ignored_if("rollout.branch", None)
_NO_OVERLONG = with_settings(
    "`overlong_penalty_factor` is 0", lambda run, settings: not settings.overlong_penalty_factor
)
_NOT_DROPPED = with_settings("`dynamic_sampling` is `false`", lambda run, settings: not settings.dynamic_sampling)
_MORE_THAN_ADVANTAGES = with_settings(
    "the loss has more terms than advantages (critic, `entropy_coeff`, `kl_loss_coef`)",
    lambda run, settings: not settings.only_advantages,
)


class NormConfig(Section):
    """Normalisation of values: subtract a mean, divide by a standard deviation."""

    mean_level: Literal["group", "batch"] | None = None
    """Scope of the subtracted mean: the prompt's group or the whole batch; null: subtract no mean."""
    mean_leave1out: bool = False
    """Exclude a value from the mean it is compared with."""
    std_level: Literal["group", "batch"] | None = None
    """Scope of the standard deviation to divide by; null: do not divide."""
    std_unbiased: bool = False
    """Divide by n - 1 instead of n in the standard deviation."""
    clip: float | None = Field(None, gt=0)
    """Maximum absolute normalised value; null: no limit."""


@takes_keys("actor")
class ActorConfig(EngineConfig):
    """The policy to train."""

    init_model: InitModelConfig | None = None
    """Start from random weights instead of `path`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    use_lora: bool = False
    """Train low-rank adapters and freeze the weights (see [LoRA](lora.md))."""
    peft_type: Literal["lora"] = "lora"
    """Kind of adapter."""
    lora_rank: Annotated[int, ignored_if("actor.use_lora", False)] = Field(32, ge=1)
    """Rank of each adapter."""
    lora_alpha: Annotated[int, ignored_if("actor.use_lora", False)] = Field(16, ge=1)
    """Scale of the adapters: their output is multiplied by `lora_alpha / lora_rank`."""
    target_modules: Annotated[list[str], ignored_if("actor.use_lora", False)] = Field([ALL_LINEAR], min_length=1)
    """Linear layers with adapters, by the last part of their Hugging Face names, such as `q_proj`; `all-linear`: all
    except the output layer."""
    ppo_n_minibatches: int = Field(1, ge=1)
    """Mini-batches of a training step, one optimizer step each."""
    turns_per_minibatch: Annotated[int | None, _NO_TURNS] = Field(None, ge=1)
    """Approximate number of turns in a mini-batch. The number of mini-batches is then the turns of a training step
    divided by it, rounded up, instead of `ppo_n_minibatches`."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the mini-batches of a training step; a critic makes one."""
    eps_clip: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH, _NO_CLIP] = Field(None, gt=0, le=1)
    """Lower clip range of the probability ratio, 1 - eps_clip; null: set by the algorithm."""
    eps_clip_higher: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH, _NO_CLIP] = Field(None, gt=0)
    """Upper clip range, 1 + eps_clip_higher; null: `eps_clip` if set, else set by the algorithm."""
    c_clip: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH, _NO_DUAL_CLIP] = Field(None, gt=1)
    """Dual clip: maximum factor of a negative advantage; null: set by the algorithm."""
    importance_sampling_level: Annotated[Literal["token", "sequence"] | None, _OWN_LOSS] = None
    """Level of the clipped ratio: one token, or the geometric mean over its sequence (GSPO); null: set by the
    algorithm."""
    use_decoupled_loss: Annotated[bool | None, _OWN_LOSS] = None
    """Clip against the weights at the start of the step, and weight tokens by the ratio of these to the weights that
    generated them (decoupled PPO). false: clip against the weights that generated them. null: set by the algorithm."""
    behave_imp_weight_mode: Annotated[BehaviourMode | None, _OWN_LOSS, _NOT_DECOUPLED] = None
    """Behaviour importance weight (proximal over behaviour probability): per token, per sequence, or geometric mean
    over a sequence; `truncate` limits it to cap and floor, `mask` sets it to 0 beyond them. null: set by the
    algorithm."""
    behave_imp_weight_cap: Annotated[float | None, _OWN_LOSS, _NOT_DECOUPLED, _NO_BEHAVIOUR_WEIGHT] = Field(None, ge=1)
    """Cap of the behaviour importance weight; null: 5, and 1.01 for a geometric mean."""
    behave_imp_weight_floor: Annotated[float | None, _OWN_LOSS, _NOT_DECOUPLED, _NO_BEHAVIOUR_WEIGHT] = Field(
        None, ge=0, le=1
    )
    """Lower bound of the behaviour importance weight, 0: none; null: none, and 1 / cap for a geometric mean. With
    `token_mask` this is IcePop."""
    behave_imp_weight_veto: Annotated[float | None, _OWN_LOSS, _NOT_DECOUPLED] = Field(None, ge=0, lt=1)
    """Give a sequence weight 0 if the weight of one of its tokens is below this, whatever the mode; 0 or null:
    never."""
    entropy_coeff: Annotated[float | None, _OWN_LOSS] = Field(None, ge=0)
    """Weight of the entropy bonus in the loss; null: set by the algorithm."""
    kl_ctl: Annotated[float | None, _OWN_LOSS] = Field(None, ge=0)
    """Weight of the KL divergence from `ref` in each token's reward; null: set by the algorithm."""
    kl_loss_coef: Annotated[float | None, _OWN_LOSS] = Field(None, ge=0)
    """Weight of the KL divergence from `ref` in the loss; null: set by the algorithm."""
    kl_estimator: Annotated[KLEstimator | None, _OWN_LOSS, _NO_KL] = None
    """Estimator of the KL divergence; null: k1 in the reward, k3 in the loss."""
    reward_scaling: Annotated[float, _OWN_LOSS] = Field(1.0, gt=0)
    """Factor of rewards, applied after `reward_bias` and before normalisation."""
    reward_bias: Annotated[float, _OWN_LOSS] = 0.0
    """Added to rewards before `reward_scaling`."""
    reward_clip: Annotated[float | None, _OWN_LOSS] = Field(None, gt=0)
    """Maximum absolute reward after `reward_scaling`; null: no limit."""
    advantage_clip: Annotated[float | None, _OWN_LOSS] = Field(None, gt=0)
    """Maximum absolute advantage, after `adv_norm`; null: no limit."""
    reward_norm: Annotated[NormConfig | None, _OWN_LOSS] = None
    """Normalisation of rewards; null: set by the algorithm."""
    adv_norm: Annotated[NormConfig | None, _OWN_LOSS] = None
    """Normalisation of advantages over tokens; null: set by the algorithm."""
    discount: Annotated[float | None, _OWN_LOSS] = Field(None, gt=0, le=1)
    """Discount of later rewards per token; null: set by the algorithm."""
    turn_discount: Annotated[float | None, _OWN_LOSS, _NO_TURNS] = Field(None, gt=0, le=1)
    """Discount of later rewards per turn of an episode of `workflow`; null: set by the algorithm."""
    state_coef: Annotated[float | None, _OWN_LOSS, _NOT_ALONE] = Field(None, ge=0)
    """Weight of a turn's advantage among the turns that start in the same state (GiGPO), beside the advantage of its
    episode; null: set by the algorithm."""
    branch_baseline: Annotated[Literal["group", "parent"] | None, _OWN_LOSS, _NO_BRANCHES] = None
    """Baseline that is subtracted from the value of a node of `rollout.branch`, the mean over its children: that of the
    `group`, as `reward_norm` sets it, or the value of the `parent` node; null: set by the algorithm."""
    gae_lambda: Annotated[float | None, _OWN_LOSS, _NO_CRITIC] = Field(None, ge=0, le=1)
    """λ of generalised advantage estimation; null: set by the algorithm."""
    loss_agg_mode: Annotated[
        Literal["token_mean", "sequence_mean", "turn_mean", "sequence_sum", "constant"] | None, _OWN_LOSS
    ] = None
    """What has equal weight in the loss: each token, each sequence, each turn, or each token in a mean over the
    sequences' sums (`sequence_sum`), which `constant` divides by `gconfig.max_new_tokens`; null: set by the
    algorithm."""
    overlong_penalty_factor: Annotated[float | None, _OWN_LOSS] = Field(None, ge=0)
    """Maximum penalty of an overlong response (DAPO); null: set by the algorithm."""
    overlong_tokens: Annotated[int | None, _OWN_LOSS, _NO_OVERLONG] = Field(None, ge=1)
    """Number of tokens before `gconfig.max_new_tokens` over which the penalty grows from 0; null: a fifth of it."""
    mask_truncated: Annotated[bool, _OWN_LOSS] = False
    """Exclude responses that a token limit cut off (`gconfig.max_new_tokens`, or an episode's) from the loss; their
    rewards still count in `reward_norm`."""
    group_reward_above: Annotated[float | None, _OWN_LOSS] = None
    """Exclude a group from the loss unless its mean reward, before `reward_bias`, is greater; null: no limit."""
    group_reward_below: Annotated[float | None, _OWN_LOSS] = None
    """Exclude a group from the loss unless its mean reward, before `reward_bias`, is smaller; null: no limit."""
    dynamic_sampling: Annotated[bool | None, _OWN_LOSS] = None
    """Replace groups whose rewards are all equal by new ones (DAPO); null: set by the algorithm."""
    max_dropped_groups: Annotated[int, _NOT_DROPPED] = Field(64, ge=0)
    """Maximum consecutive groups that are replaced; the next one is kept, and the count restarts."""
    skip_zero_advantages: Annotated[bool | None, _OWN_LOSS, _MORE_THAN_ADVANTAGES] = None
    """Exclude responses whose advantages are all 0 from the training pass. The gradient stays the same except for
    expert load balancing; entropy and KL statistics cover the remaining responses. null: false."""
    reward_coef: Annotated[float | None, _OWN_LOSS] = Field(None, ge=0)
    """Weight of the reward's advantages; null: set by the algorithm (0 with `distill`)."""
    teacher_coef: Annotated[float | None, _OWN_LOSS] = Field(None, ge=0)
    """Weight of `teacher` in the advantage of each token: its log-prob minus the policy's; null: set by the algorithm
    (1 with `distill`)."""
    policy_drift_coeff: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH] = Field(None, ge=0)
    """Weight of the drift from the weights at the start of the step (CPGD); null: set by the algorithm."""
    sapo_tau_pos: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH, _NO_GATE] = Field(None, gt=0)
    """Steepness of SAPO's gate for positive advantages; null: set by the algorithm."""
    sapo_tau_neg: Annotated[float | None, _OWN_LOSS, _ONE_MINIBATCH, _NO_GATE] = Field(None, gt=0)
    """Steepness of SAPO's gate for negative advantages; null: set by the algorithm."""
    value_decay: Annotated[float, _NO_PROMPT_VALUES] = Field(0.9, ge=0, lt=1)
    """Weight of earlier rewards of a prompt in its running value when there is a new one, and of earlier steps in the
    mean over all prompts."""
    dpo_beta: Annotated[float, _NOT_DPO] = Field(0.1, gt=0)
    """Inverse temperature β of `algorithm: dpo`."""

    @property
    def repeats(self) -> bool:
        """Whether a training step may have several optimizer steps."""
        return self.ppo_n_minibatches > 1 or self.turns_per_minibatch is not None or self.ppo_epochs > 1


_ALTERNATIVES = {"reward": ("type", "function", "parts")}  # a section has one of them


class AdapterConfig(Section):
    """One of several adapters: settings that differ from the run's own."""

    algorithm: str | None = None
    """Its algorithm; null: `algorithm` of the run."""
    train_dataset: dict[str, Any] = Field({})
    """Keys of `train_dataset` that differ."""
    valid_dataset: dict[str, Any] = Field({})
    """Keys of `valid_dataset` that differ."""
    reward: dict[str, Any] = Field({})
    """Keys of `reward` that differ."""
    actor: dict[str, Any] = Field({})
    """Settings of the algorithm in `actor` that differ."""

    def merge_into(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a run that has this adapter alone, from the run's."""
        merged = {**values, "adapters": {}, "algorithm": self.algorithm or values["algorithm"]}
        for name in ("train_dataset", "valid_dataset", "reward", "actor"):
            own: dict[str, Any] = getattr(self, name)
            if own:
                taken = _ALTERNATIVES.get(name, ())
                dropped = taken if any(key in own for key in taken) else ()
                before = values.get(name) or {}
                merged[name] = _merge({key: value for key, value in before.items() if key not in dropped}, own)
        return merged


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with changes."""
    merged = dict(values)
    for name, change in changes.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(change, Mapping)
        merged[name] = _merge(before, change) if both else change  # type: ignore[arg-type]
    return merged


def _names(adapters: dict[str, AdapterConfig]) -> dict[str, AdapterConfig]:
    """Check the names, which directories, metrics and adapters on servers have too."""
    for name in adapters:
        if not name.isascii() or not name.replace("_", "").replace("-", "").isalnum() or len(name) > 64:
            raise ValueError(f"a name has at most 64 letters, digits, `_` and `-`; {name!r} does not")
    return adapters


Adapters = Annotated[dict[str, AdapterConfig], AfterValidator(_names)]
