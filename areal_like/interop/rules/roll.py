"""Values that follow from several of ROLL's keys."""

from areal_like.interop.keys.entries import IMAGES, NO_ALGORITHM, PATTERN
from areal_like.interop.rules.translation import Translation
from areal_like.interop.rules.verl import aggregation

_TRAIN, _CONFIG = "actor_train.training_args", "actor_train.strategy_args.strategy_config"
_INFER = "actor_infer.generating_args"
_AGENTS = "environments and agents are not converted: write a workflow (docs/workflows.md)"
_NAMES = {"gae": "ppo", "reinforce": "reinforce_pp", "grpo": "grpo"}
_PATHS = ("actor_train.data_args.file_name", "validation.data_args.file_name")
_IMAGES = ("-vl-", "-VL-", "omni", "Omni")


def rules(peer: Translation, text: str) -> None:
    """Write the values that follow from several of ROLL's keys."""
    estimator = str(peer.get("adv_estimator"))
    _algorithm(peer, estimator)
    _norms(peer, estimator)
    _clips(peer)
    aggregation(peer, "loss_agg_mode")
    _divergence(peer)
    _batches(peer)
    for key in (f"{_INFER}.top_p", f"{_INFER}.top_k"):
        if key not in peer.said and peer.get(key) not in (1, -1):
            peer.changes[key] = f"ROLL's default {peer.get(key)}: {PATTERN}"
    if peer.is_on("is_offload_states"):
        peer.ours["rollout.sharing"] = "alternate"
    if (ratio := peer.number("async_generation_ratio")) is not None:
        peer.ours["rollout.max_head_offpolicyness"] = -int(-ratio // 1)
    _data(peer)


def _algorithm(peer: Translation, estimator: str) -> None:
    if estimator in _NAMES:
        peer.ours["algorithm"] = _NAMES[estimator]
    else:
        peer.unknown_algorithm("adv_estimator", f"{estimator}: {NO_ALGORITHM}")
    for key, plain in (("use_policy_loss_type", "PPO"), ("pg_variant", "vanilla")):
        if peer.get(key) not in (None, plain, "ppo"):
            peer.unknown_algorithm(key, f"{peer.get(key)}: {NO_ALGORITHM}")
    for key in [key for key in peer.said if key.split(".")[0] in ("sft_train", "student", "student_train", "beta")]:
        peer.fill(
            "algorithm", "supervised, preference and distillation pipelines are not supported (docs/algorithms.md)"
        )
        peer.changes[key.split(".")[0]] = "this pipeline is not reinforcement learning"
    peer.ours["actor.use_decoupled_loss"] = not peer.is_on("force_disable_old_logprobs_recompute")
    peer.behaviour("disabled")
    if estimator == "gae":
        peer.ours["actor.gae_lambda"] = peer.get("lambd")
        peer.ours["critic.warmup_steps"] = peer.get("critic_warmup") or 0
        clip = peer.get("value_clip")
        if clip is None:
            peer.changes["value_clip"] = "ROLL does not clip values; critic.eps_clip always does"
        else:
            peer.ours["critic.eps_clip"] = clip


def _norms(peer: Translation, estimator: str) -> None:
    kinds = {"mean_level": peer.get("norm_mean_type"), "std_level": peer.get("norm_std_type")}
    if estimator == "grpo":
        kinds = {"mean_level": "group", "std_level": "group"}
    if "running" in kinds.values():
        peer.changes["norm_mean_type"] = "running: rewards are normalised within a group or a step"
    levels = {key: kind if kind in ("group", "batch") else None for key, kind in kinds.items()}
    peer.norm("actor.reward_norm", **levels, std_unbiased=levels["std_level"] is not None)
    whole = "batch" if peer.is_on("whiten_advantages") else None
    peer.norm("actor.adv_norm", mean_level=whole, std_level=whole, std_unbiased=whole is not None)
    clip, group = peer.number("reward_clip"), peer.number("num_return_sequences_in_group") or 1
    if clip and levels["std_level"] == "group" and clip * clip >= group:
        peer.unneeded["reward_clip"] = f"normalised rewards of {group} samples are smaller"
    elif clip and kinds == {"mean_level": None, "std_level": None}:
        peer.ours["actor.reward_clip"] = clip
    elif clip:
        peer.changes["reward_clip"] = "areal-like clips rewards before normalising them, not afterwards"


def _clips(peer: Translation) -> None:
    names = ("pg_clip_low", "pg_clip_high") if peer.is_on("use_pg_clip_range") else ("pg_clip", "pg_clip")
    peer.ours["actor.eps_clip"], peer.ours["actor.eps_clip_higher"] = map(peer.get, names)
    peer.ours["actor.c_clip"] = 1 + 2 * peer.get("pg_clip") if peer.is_on("dual_clip_loss") else None


def _divergence(peer: Translation) -> None:
    peer.ours["actor.kl_ctl"] = peer.get("init_kl_coef") if peer.is_on("add_token_level_kl") else 0.0
    peer.ours["actor.kl_loss_coef"] = peer.get("kl_loss_coef") if peer.is_on("use_kl_loss") else 0.0
    if peer.ours["actor.kl_ctl"]:
        peer.ours["actor.kl_estimator"] = {"kl": "k1", "mse": "k2"}.get(str(peer.get("kl_penalty")), "k3")
        if peer.get("target_kl") is not None:
            peer.changes["target_kl"] = "the weight of the KL divergence is constant"
    elif peer.ours["actor.kl_loss_coef"]:
        peer.ours["actor.kl_estimator"] = "k3"


def _batches(peer: Translation) -> None:
    least, most = peer.number(f"{_TRAIN}.lr_scheduler_kwargs.min_lr"), peer.number(f"{_TRAIN}.learning_rate")
    if least and most:
        peer.ours["actor.optimizer.min_lr_ratio"] = least / most
    prompts, group = peer.get("rollout_batch_size"), peer.get("num_return_sequences_in_group")
    parts = [peer.get(f"{_TRAIN}.{k}") for k in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    if peer.data_parallel and all(isinstance(value, int) for value in (prompts, group, *parts)):
        size = parts[0] * parts[1] * peer.data_parallel
        peer.minibatches(prompts * group, size, f"{_TRAIN}.gradient_accumulation_steps")
    else:
        peer.fill("actor.ppo_n_minibatches", "optimizer steps per training step: the batch size is unknown")


def _data(peer: Translation) -> None:
    peer.ours["train_dataset.overlong_prompts"] = "drop"
    model = str(peer.get("actor_train.model_args.model_name_or_path", "pretrain"))
    if any(mark in model for mark in _IMAGES):
        peer.changes["pretrain"] = f"{model}: {IMAGES}"
    train, held_out = (peer.get(key) for key in _PATHS)
    files = train if isinstance(train, list) else [train] if train else []
    if len(files) == 1:
        peer.ours["train_dataset.path"] = files[0]
    elif files:
        peer.fill("train_dataset.path", f"one of {', '.join(map(str, files))}; set the others in train_dataset.mixture")
    if held_out:
        peer.ours["valid_dataset.path"] = held_out[0] if isinstance(held_out, list) else held_out
    if "actor_train.data_args.messages" in peer.said:
        peer.ours["train_dataset.prompt_field"] = peer.get("actor_train.data_args.messages")
    if peer.get("sequence_length") and peer.get("response_length") is None:
        peer.fill("gconfig.max_new_tokens", "ROLL's sequence_length covers prompt and response together")
    if any(peer.keys_below("custom_envs")) or any(peer.keys_below("train_env_manager")):
        peer.fill("workflow", _AGENTS)
    judges = sorted({key.split(".")[1] for key, _ in peer.keys_below("rewards")})
    if judges:
        peer.fill("reward.function", f"rewards {', '.join(judges)}: write them as my_rewards.py:score")
    for key, value in peer.keys_below("rewards"):
        if key.endswith(("query_filter_config.type", "response_filter_config.type")) and value != "no_filter":
            peer.changes[key] = "only groups of equal rewards are replaced (actor.dynamic_sampling)"
    others = [str(value) for key, value in peer.keys_below("defaults") if not str(value).endswith("_self_")]
    if peer.get("defaults"):
        others.append(str(peer.get("defaults")))
    if others:
        peer.unneeded["defaults"] = f"these included files were not read: {', '.join(others)}"
    if (rank := peer.number("actor_train.model_args.lora_rank")) is not None:
        peer.ours |= {"actor.use_lora": True, "actor.lora_rank": rank}
        target = peer.get("actor_train.model_args.lora_target")
        if target and target not in ("all-linear", "all"):
            peer.ours["actor.target_modules"] = target if isinstance(target, list) else str(target).split(",")
