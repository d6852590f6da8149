"""Settings of policy-gradient algorithms: each preset is a set of defaults, which the actor's keys may change.

Only the preset sets a field that has no key of its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal

from areal_like.core.config.schema import ActorConfig, BehaviourMode, KLEstimator, NormConfig

type Objective = Literal["ppo", "cispo", "cpgd", "gmpo", "sapo", "topr"]
NOTHING = NormConfig()
IN_GROUP = NormConfig(mean_level="group", std_level="group")
FROM_GROUP_MEAN = NormConfig(mean_level="group")
LEFT_OUT = NormConfig(mean_level="group", mean_leave1out=True)
CENTRED = NormConfig(mean_level="batch")
IN_BATCH = NormConfig(mean_level="batch", std_level="batch")
CAP, GEOMETRIC_CAP = 5.0, 1.01  # default of `behave_imp_weight_cap`, by the level of the weight


@dataclass(frozen=True)
class Settings:
    """The keys' values merged with a preset; the keys define their meaning (`areal_like/core/config/schema/`).

    `objective` is the loss of a token (`objectives.py`); `critic` takes advantages from a critic's values,
    `prompt_baseline` subtracts the value of its prompt from each reward, and with `turns_alone` each turn is a sample
    of its own in statistics of rewards; without `state_coef` turns are not compared within states.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float = 0.2
    c_clip: float | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    use_decoupled_loss: bool = True
    behave_imp_weight_mode: BehaviourMode = "token_truncate"
    behave_imp_weight_cap: float | None = None
    behave_imp_weight_floor: float | None = None
    behave_imp_weight_veto: float | None = None
    entropy_coeff: float = 0.0
    kl_ctl: float = 0.0
    kl_loss_coef: float = 0.0
    kl_estimator: KLEstimator | None = None
    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    reward_clip: float | None = None
    advantage_clip: float | None = None
    reward_norm: NormConfig = NOTHING
    adv_norm: NormConfig = NOTHING
    discount: float = 1.0
    turn_discount: float = 1.0
    state_coef: float | None = None
    branch_baseline: Literal["group", "parent"] = "group"
    gae_lambda: float = 1.0
    loss_agg_mode: Literal["token_mean", "sequence_mean", "turn_mean", "sequence_sum", "constant"] = "token_mean"
    overlong_penalty_factor: float = 0.0
    overlong_tokens: int | None = None
    dynamic_sampling: bool = False
    mask_truncated: bool = False
    group_reward_above: float | None = None
    group_reward_below: float | None = None
    skip_zero_advantages: bool = False
    reward_coef: float = 1.0
    teacher_coef: float = 0.0
    policy_drift_coeff: float = 0.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    objective: Objective = "ppo"
    critic: bool = False
    prompt_baseline: bool = False
    turns_alone: bool = False

    @property
    def weight_bounds(self) -> tuple[float, float]:
        """Return floor and cap of the behaviour weight; 0 means without a floor.

        A geometric mean is near 1 and leaves it in both directions: its cap is 1.01 by default and its floor 1 / cap.
        """
        geometric = self.behave_imp_weight_mode.startswith("geometric")
        cap = self.behave_imp_weight_cap or (GEOMETRIC_CAP if geometric else CAP)
        floor = self.behave_imp_weight_floor
        return (1 / cap if geometric else 0.0) if floor is None else floor, cap

    @property
    def only_advantages(self) -> bool:
        """Whether a trajectory with zero advantages contributes nothing to any gradient."""
        return not (self.critic or self.entropy_coeff or self.kl_loss_coef)


PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        # DeepSeekMath (arXiv 2402.03300), with the loss of AReaL (arXiv 2505.24298) over all tokens of a step
        "grpo": Settings(reward_norm=IN_GROUP),
        # Understanding R1-Zero-like training (arXiv 2503.20783): neither deviation nor length divides
        "dr_grpo": Settings(reward_norm=FROM_GROUP_MEAN, loss_agg_mode="constant"),
        # DAPO (arXiv 2503.14476)
        "dapo": Settings(
            reward_norm=IN_GROUP, eps_clip_higher=0.28, overlong_penalty_factor=1.0, dynamic_sampling=True
        ),
        # Back to basics (arXiv 2402.14740): the whole response is one action, so its tokens' terms are summed
        "rloo": Settings(reward_norm=LEFT_OUT, loss_agg_mode="constant"),
        # REINFORCE++ (arXiv 2501.03262)
        "reinforce_pp": Settings(adv_norm=IN_BATCH),
        # Single-stream policy optimization (arXiv 2509.13232): one response per prompt, the prompt's running value as
        # its baseline, advantages normalised over the batch
        "single_rollout": Settings(adv_norm=IN_BATCH, prompt_baseline=True),
        # REINFORCE (Williams, 1992) with each turn as an action, whose return is its reward to go
        "turn_reinforce": Settings(reward_norm=IN_GROUP, loss_agg_mode="turn_mean", turns_alone=True),
        # GiGPO (arXiv 2505.10978): deviations divide as in GRPO; 0.95 is the discount of its published runs
        "gigpo": Settings(
            reward_norm=IN_GROUP, loss_agg_mode="turn_mean", turns_alone=True, state_coef=1.0, turn_discount=0.95
        ),
        # GSPO (arXiv 2507.18071)
        "gspo": Settings(
            reward_norm=IN_GROUP,
            importance_sampling_level="sequence",
            behave_imp_weight_mode="geometric_truncate",  # times the ratio it is the sequence's ratio to the behaviour
            eps_clip=3e-4,
            eps_clip_higher=4e-4,
            loss_agg_mode="sequence_mean",
        ),
        # CISPO in MiniMax-M1 (arXiv 2506.13585), no clip below; the bound above is from ScaleRL (arXiv 2510.13786)
        "cispo": Settings(
            reward_norm=IN_GROUP, objective="cispo", use_decoupled_loss=False, eps_clip=1.0, eps_clip_higher=4.0
        ),
        # CPGD (arXiv 2505.12504), with the drift of its published runs
        "cpgd": Settings(reward_norm=IN_GROUP, objective="cpgd", policy_drift_coeff=1e-3),
        # GMPO (arXiv 2507.20673): bounds of the logarithm of a token's ratio
        "gmpo": Settings(
            reward_norm=IN_GROUP,
            objective="gmpo",
            behave_imp_weight_mode="geometric_truncate",
            eps_clip=0.4,
            eps_clip_higher=0.4,
            loss_agg_mode="sequence_mean",
        ),
        # SAPO (arXiv 2511.20347)
        "sapo": Settings(reward_norm=IN_GROUP, objective="sapo", loss_agg_mode="sequence_mean"),
        # TOPR (arXiv 2503.14286), whose rewards are 1 and -1 without a baseline; the ratio is to the behaviour policy
        "topr": Settings(objective="topr", use_decoupled_loss=False),
        # PPO (arXiv 1707.06347) with GAE (arXiv 1506.02438)
        "ppo": Settings(adv_norm=IN_BATCH, critic=True),
        # On-policy distillation (thinkingmachines.ai/blog/on-policy-distillation): the reverse KL of each token. Unlike
        # in the source, its mean over the step is a baseline.
        "distill": Settings(reward_norm=IN_GROUP, adv_norm=CENTRED, reward_coef=0.0, teacher_coef=1.0),
    }
)
KEYS = tuple(field.name for field in fields(Settings) if field.name in ActorConfig.model_fields)


def settings_of(preset: Settings, actor: ActorConfig) -> Settings:
    """Return the preset with all set keys; `eps_clip` alone is the range on both sides."""
    given = {key: value for key in KEYS if (value := getattr(actor, key)) is not None}
    if actor.eps_clip is not None:
        given.setdefault("eps_clip_higher", actor.eps_clip)
    return replace(preset, **given)
