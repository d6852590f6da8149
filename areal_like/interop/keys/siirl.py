"""siiRL's keys: verl's, and a few of its own."""

from areal_like.interop.keys import shared
from areal_like.interop.keys.entries import Table, changes, drop, together
from areal_like.interop.keys.verl import DEFAULTS as VERLS
from areal_like.interop.keys.verl import VERL

_EMBODIED = "embodied models are not supported: prompts are text"
SIIRL: Table = {
    **VERL,
    "trainer.trainer_strategy": shared.LAYOUT,
    "dag.workflow_path": changes("the data flow of a run is fixed"),
    "dag": shared.SPEED,
    "algorithm.workflow_type": drop("use algorithm.filter_groups for DAPO's filter"),
    "algorithm.algorithm_name": drop("use algorithm.adv_estimator"),
    "algorithm.weight_factor_in_cpgd": changes("the weight of an advantage is its group's deviation", "STD_weight"),
    "algorithm.share_reward_in_agent": drop("a workflow defines its rewards"),
    "algorithm.embodied_sampling": changes(_EMBODIED),
    "actor_rollout_ref.embodied": changes(_EMBODIED),
    "actor_rollout_ref.actor.use_cpgd_loss": together("actor.policy_drift_coeff"),
    "actor_rollout_ref.actor.policy_drift_coeff": together("actor.policy_drift_coeff"),
    "actor_rollout_ref.actor.recompute_old_log_prob": changes("proximal log-probs are always computed", True),
    "critic.use_critic_model": drop("algorithm.adv_estimator determines whether the run has a critic"),
    "data.dataset_type": changes(_EMBODIED, "llm"),
    "data.auto_repeat": shared.SPEED,
    "data.force_on_the_fly": shared.SPEED,
    "data.preprocess_mode": shared.SPEED,
    "data.num_loader_workers": shared.SPEED,
}
DEFAULTS = dict(VERLS)
