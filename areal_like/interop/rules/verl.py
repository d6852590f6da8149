"""Values that follow from several of verl's keys; siiRL's are the same."""

import re
from typing import Any

from areal_like.interop.keys import is_async_command, is_sft_command
from areal_like.interop.keys.shared import NO_ALGORITHM, TRAINERS_ROUTES
from areal_like.interop.rules.images import sees_images
from areal_like.interop.rules.offline import imitate_in_verl, write_optimizer
from areal_like.interop.rules.translation import BATCH_NORM, GROUP_NORM, MISSING, Translation

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_CORRECTION = "algorithm.rollout_correction"
_GROUP = {"mean_level": "group"}
_ESTIMATED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # preset, reward_norm, adv_norm
    "gae": ("ppo", {}, BATCH_NORM),
    "grpo": ("grpo", _GROUP, {}),
    "grpo_vectorized": ("grpo", _GROUP, {}),
    "cpgd": ("grpo", GROUP_NORM, {}),  # siiRL's
    "rloo": ("rloo", {**_GROUP, "mean_leave1out": True}, {}),
    "rloo_vectorized": ("rloo", {**_GROUP, "mean_leave1out": True}, {}),
    "reinforce_plus_plus": ("reinforce_pp", {}, BATCH_NORM),
    "reinforce_plus_plus_baseline": ("reinforce_pp", _GROUP, BATCH_NORM),
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
_LOSSES = {"vanilla": None, **{name: name for name in ("gspo", "cispo", "sapo", "cpgd")}, "geo_mean": "gmpo"}
_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
_BY_SEQUENCE = ("sapo", "geo_mean")  # regardless of loss_agg_mode


def rules(peer: Translation, text: str) -> None:
    """Write the values that follow from several of verl's keys."""
    estimator = str(peer.get("algorithm.adv_estimator")).rpartition(".")[2].lower()
    if is_sft_command(text):
        imitate_in_verl(peer)
        return
    if re.search(r"main_generation|main_eval", text) and "main_ppo" not in text:
        peer.unknown_algorithm("algorithm", "this command does not start reinforcement learning (docs/algorithms.md)")
        return
    _algorithm(peer, estimator)
    _divergence(peer, estimator)
    if str(peer.get(f"{_ACTOR}.policy_loss.loss_mode")) in _BY_SEQUENCE:
        peer.ours["actor.loss_agg_mode"] = "sequence_mean"
    else:
        aggregation(peer, f"{_ACTOR}.loss_agg_mode")
    batch, mini = peer.get("data.train_batch_size"), peer.get(f"{_ACTOR}.ppo_mini_batch_size")
    peer.minibatches(batch, mini, f"{_ACTOR}.ppo_mini_batch_size")
    epochs = peer.get("critic.ppo_epochs", f"{_ACTOR}.ppo_epochs")
    if estimator == "gae" and epochs not in (None, 1):
        peer.changes["critic.ppo_epochs"] = f"{epochs}: the critic makes one pass over the mini-batches of a step"
    if estimator == "gae" and (own := peer.get("critic.ppo_mini_batch_size")) not in (None, mini):
        peer.changes["critic.ppo_mini_batch_size"] = f"{own}: the critic uses the actor's mini-batches"
    _correction(peer)
    peer.replay(replays_routes(peer))
    _lora(peer)
    optimizers(peer)
    if peer.system == "siirl" and "megatron" in str(peer.get(f"{_ACTOR}.strategy", "trainer.trainer_strategy")):
        peer.ours["actor.optimizer.lr_scheduler_type"] = peer.get(f"{_ACTOR}.optim.lr_decay_style") or "linear"
    _data(peer)
    _evaluation(peer)
    _reward(peer)
    if is_async_command(text):
        _stream(peer)
    elif "one_step_off_policy" in text:
        peer.ours["rollout.max_head_offpolicyness"] = 1


def _algorithm(peer: Translation, estimator: str) -> None:
    known = _ESTIMATED.get(estimator)
    if known is None:
        peer.unknown_algorithm("algorithm.adv_estimator", f"{estimator}: {NO_ALGORITHM}")
        return
    name, reward_norm, adv_norm = known
    if estimator.startswith("grpo") and peer.is_on("algorithm.norm_adv_by_std_in_grpo"):
        reward_norm = GROUP_NORM
    peer.ours["algorithm"] = name
    peer.norm("actor.reward_norm", **reward_norm)
    peer.norm("actor.adv_norm", **adv_norm)
    mode = str(peer.get(f"{_ACTOR}.policy_loss.loss_mode"))
    peer.ours["actor.eps_clip"] = min(1.0, peer.number(f"{_ACTOR}.clip_ratio_low") or 0.2)  # 1: no bound below
    peer.ours["actor.importance_sampling_level"] = "sequence" if mode == "gspo" else "token"
    peer.ours["actor.c_clip"] = peer.number(f"{_ACTOR}.clip_ratio_c") if mode == "vanilla" else None
    if mode not in _LOSSES:
        peer.unknown_algorithm(f"{_ACTOR}.policy_loss.loss_mode", f"{mode}: {NO_ALGORITHM}")
    elif own := _LOSSES[mode]:
        peer.ours["algorithm"] = own
    if mode == "sapo":
        peer.ours |= {f"actor.sapo_{tau}": peer.get(f"{_ACTOR}.{tau}") for tau in ("tau_pos", "tau_neg")}
    peer.ours["actor.policy_drift_coeff"] = _drift(peer)
    if name == "ppo":
        peer.ours["actor.gae_lambda"] = peer.get("algorithm.lam")
        peer.ours["critic.warmup_steps"] = peer.get("trainer.critic_warmup") or 0


def _drift(peer: Translation) -> float:
    """Return the weight of siiRL's policy drift, which two keys enable."""
    on = peer.is_on(f"{_ACTOR}.use_cpgd_loss") or str(peer.get("algorithm.adv_estimator")) == "cpgd"
    return float(peer.number(f"{_ACTOR}.policy_drift_coeff") or 0) if on and peer.system == "siirl" else 0.0


def aggregation(peer: Translation, key: str) -> None:
    """Write the loss aggregation, which systems derived from verl name identically."""
    mode = str(peer.get(key))
    if mode in AGGREGATIONS:
        peer.ours["actor.loss_agg_mode"] = AGGREGATIONS[mode]
    else:
        peer.changes[key] = f"{mode}: actor.loss_agg_mode is {', '.join(AGGREGATIONS.values())}; constant is used"
        peer.ours["actor.loss_agg_mode"] = "constant"


def _divergence(peer: Translation, estimator: str) -> None:
    """Write both KL terms, which are off by default; add the reference if one is on."""
    in_reward, in_loss = peer.is_on("algorithm.use_kl_in_reward"), peer.is_on(f"{_ACTOR}.use_kl_loss")
    peer.ours["actor.kl_ctl"] = peer.get("algorithm.kl_ctrl.kl_coef") if in_reward else 0.0
    peer.ours["actor.kl_loss_coef"] = peer.get(f"{_ACTOR}.kl_loss_coef") if in_loss else 0.0
    peer.divergence("algorithm.kl_penalty", f"{_ACTOR}.kl_loss_type")
    if in_reward and estimator not in ("gae", "reinforce_plus_plus"):
        peer.changes["algorithm.use_kl_in_reward"] = (
            "it is subtracted from the reward after the group's norm, not before"
        )


def _stream(peer: Translation) -> None:
    """Write the batches of verl's fully asynchronous trainer: a step trains all batches between two weight updates."""
    place = "async_training"
    updates, batches = (peer.get(f"{place}.{key}") for key in ("trigger_parameter_sync_step", "require_batches"))
    mini, whole = peer.get(f"{_ACTOR}.ppo_mini_batch_size"), peer.get("rollout.total_rollout_steps")
    if all(isinstance(value, int) and value > 0 for value in (updates, batches, mini)):
        peer.ours["train_dataset.batch_size"] = updates * batches * mini
        peer.ours["actor.ppo_n_minibatches"] = updates * batches
        peer.changes.pop(f"{_ACTOR}.ppo_mini_batch_size", None)
        peer.missing.pop("actor.ppo_n_minibatches", None)
        if isinstance(whole, int):
            peer.ours["total_train_steps"] = max(1, whole // (updates * batches * mini))
            peer.ours["total_train_epochs"] = peer.ours["total_train_steps"]
    else:
        peer.fill("train_dataset.batch_size", f"{place}: the prompts between two weight updates are unknown")
    bound = peer.number(f"{place}.staleness_threshold")
    if bound is None:
        peer.fill("rollout.max_head_offpolicyness", f"{place}.staleness_threshold is unknown")
    else:
        peer.ours["rollout.max_head_offpolicyness"] = bound = -int(-bound // 1)
    if bound:
        peer.ours["weight_update.requests"] = "recompute" if peer.is_on(f"{place}.partial_rollout") else "drain"
    if peer.is_on(f"{place}.compute_prox_log_prob"):
        peer.ours["actor.use_decoupled_loss"] = True
    if (every := peer.number("rollout.test_freq")) is not None:
        peer.ours["evaluator.freq_steps"] = every if every > 0 else None


def _correction(peer: Translation) -> None:
    """Write the ratio's centre: the trainer's own log-probs, or the servers' if they are corrected."""
    peer.ours["actor.use_decoupled_loss"] = not peer.is_on(f"{_CORRECTION}.bypass_mode")
    cap = peer.get(f"{_ACTOR}.tis_imp_ratio_cap")
    if isinstance(cap, int | float) and cap > 0:
        peer.behaviour("token_truncate", cap)
        return
    weight, rejected = peer.get(f"{_CORRECTION}.rollout_is"), peer.get(f"{_CORRECTION}.rollout_rs")
    if weight in ("token", "sequence") and rejected is None:
        limit = str(peer.get(f"{_CORRECTION}.rollout_is_threshold") or 2.0)
        lower, _, upper = limit.rpartition("_")  # with both bounds, weights outside are 0
        peer.behaviour(f"{weight}_{'mask' if lower else 'truncate'}", float(upper), float(lower or 0))
    else:
        peer.behaviour("disabled")
        _note_correction(peer, weight, rejected)
    if veto := peer.number(f"{_CORRECTION}.rollout_token_veto_threshold"):
        peer.ours["actor.behave_imp_weight_veto"] = veto
    for name in ("rollout_is_batch_normalize", "rollout_rs_threshold_lower"):
        if peer.get(f"{_CORRECTION}.{name}") not in (None, False):
            peer.changes[f"{_CORRECTION}.{name}"] = "only actor.behave_imp_weight_cap and its floor bound the weight"


def _note_correction(peer: Translation, weight: Any, rejected: Any) -> None:
    """Note weights and rejection of off-policy samples that actor.behave_imp_weight_mode does not have."""
    mode = "actor.behave_imp_weight_mode"
    if weight is not None and rejected is not None:
        note = f"{weight} weights with {rejected} rejection: {mode} supports only one of them"
        peer.changes[f"{_CORRECTION}.rollout_rs"] = note
    elif rejected is not None:
        note = f"{rejected} rejection without weights: a mask in {mode} also weights what it keeps"
        peer.changes[f"{_CORRECTION}.rollout_rs"] = note
    elif weight is not None:
        peer.changes[f"{_CORRECTION}.rollout_is"] = f"{weight} weights: {mode} lists the supported weights"


def replays_routes(peer: Translation, place: str = "") -> bool:
    """Return whether the servers' routes are replayed, by verl's keys below `place`; note the trainer's own routes."""
    modes = [f"{place}{_ACTOR}.{part}router_replay.mode" for part in ("", "megatron.")]
    named = {key: str(peer.said[key]) for key in modes if peer.said.get(key) is not None}
    peer.changes.update({key: TRAINERS_ROUTES for key, mode in named.items() if mode == "R2"})
    if named:
        return "R3" in named.values()
    return peer.is_on(f"{place}{_ROLLOUT}.enable_rollout_routing_replay")


def _lora(peer: Translation) -> None:
    rank = peer.number(f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank") or 0
    if rank > 0:
        alpha = peer.get(f"{_MODEL}.lora_alpha", f"{_MODEL}.lora.alpha") or 16
        peer.adapters(rank, alpha, peer.get(f"{_MODEL}.target_modules", f"{_MODEL}.lora.target_modules"))


def optimizers(peer: Translation, place: str = "") -> None:
    """Write betas, warm-up and final rate of actor and critic, whose sections are below `place`."""
    write_optimizer(peer, f"{place}{_ACTOR}.optim", "actor.optimizer")
    write_optimizer(peer, f"{place}critic.optim", "critic.optimizer")


def _data(peer: Translation) -> None:
    how = {"left": "truncate", "error": "refuse"}.get(str(peer.get("data.truncation")))
    filtered = peer.is_on("data.filter_overlong_prompts")
    peer.ours["train_dataset.overlong_prompts"] = "drop" if filtered else how or "refuse"
    if how is None and not filtered:
        peer.changes["data.truncation"] = f"{peer.get('data.truncation')}: the last tokens of a prompt are kept"
    peer.ours["train_dataset.answer_field"] = "reward_model.ground_truth"
    seeing = sees_images(peer, f"{_MODEL}.path", ("data.train_files", "data.val_files"), "data.image_key")
    if seeing and peer.ours.get("actor.use_lora") and "visual" not in str(peer.get(f"{_MODEL}.exclude_modules")):
        peer.changes[f"{_MODEL}.exclude_modules"] = "adapters are those of the language model, not of the vision tower"
    if peer.get("data.custom_cls.path"):
        peer.fill("train_dataset.path", "data.custom_cls: write the rows as my_data.py:rows")
    names = ("multi_turn.enable", "agent.default_agent_loop", "agent.agent_loop_config_path")
    for key in [*(f"{_ROLLOUT}.{name}" for name in names), "data.tool_config_path"]:
        if peer.get(key) not in (None, False, "False", "single_turn_agent"):
            peer.fill("workflow", f"{key}: write the agent as a function (docs/workflows.md)")


def _evaluation(peer: Translation) -> None:
    """Write the sampling of evaluations; without `do_sample`, siiRL's are greedy, and verl's agent loop ignores it."""
    place = f"{_ROLLOUT}.val_kwargs"
    greedy = peer.system == "siirl" and not peer.is_on(f"{place}.do_sample")
    peer.evaluate(
        "evaluator",
        0.0 if greedy else peer.get(f"{place}.temperature"),
        peer.get(f"{place}.top_p"),
        peer.get(f"{place}.top_k"),
    )


def _reward(peer: Translation) -> None:
    place = next((place for place in _OVERLONG if any(peer.keys_below(place))), _OVERLONG[0])
    if peer.is_on(f"{place}.enable"):
        peer.ours["actor.overlong_penalty_factor"] = peer.get(f"{place}.penalty_factor")
        peer.ours["actor.overlong_tokens"] = peer.get(f"{place}.len")
    if (own := peer.get("custom_reward_function.path", "reward.custom_reward_function.path")) is not None:
        peer.fill("reward.function", f"{own}: write it as my_rewards.py:score, which takes (response, row)")
    elif peer.is_on("reward_model.enable", "reward.reward_model.enable"):
        path = peer.get("reward_model.model.path", "reward.reward_model.model_path")
        peer.ours |= {"reward.type": "model", "reward.model.path": path or MISSING}
        peer.fill("reward.model.backend", "the layout of the reward model's servers, such as sglang:d1")
    elif "gsm8k" in str(peer.get("data.train_files")).lower() and "math" not in str(peer.get("data.train_files")):
        peer.ours["reward.type"] = "gsm8k"
