"""Values that follow from several of ROLL's keys."""

import re
from typing import Any

from areal_like.interop.keys.shared import ALL_WORDS, NO_ALGORITHM
from areal_like.interop.rules.images import sees_images, write_rows
from areal_like.interop.rules.offline import train_on_dataset
from areal_like.interop.rules.roll_turns import BY_TURN, batch_turns, credit_turns, samples_per_step
from areal_like.interop.rules.roll_turns import TRAIN as _TRAIN
from areal_like.interop.rules.translation import BATCH_NORM, Translation
from areal_like.interop.rules.verl import aggregation

_INFER = "actor_infer.generating_args"
_AGENTS = "environments and agents are not converted: write a workflow (docs/workflows.md)"
_NAMES = {"gae": "ppo", "reinforce": "reinforce_pp", "grpo": "grpo", **BY_TURN}
_BY_TEACHER = "write algorithm=distill and a section teacher by hand (docs/algorithms.md#distillation)"
_PATHS = ("actor_train.data_args.file_name", "validation.data_args.file_name")


def rules(peer: Translation, text: str) -> None:
    """Write the values that follow from several of ROLL's keys."""
    estimator = str(peer.get("adv_estimator"))
    _algorithm(peer, estimator)
    _norms(peer, estimator)
    _clips(peer)
    _masks(peer, estimator)
    aggregation(peer, "loss_agg_mode")
    _divergence(peer)
    peer.final_rate(f"{_TRAIN}.lr_scheduler_kwargs.min_lr", f"{_TRAIN}.learning_rate")
    batch_turns(peer) if estimator in BY_TURN else _batches(peer)
    if any(peer.keys_below("train_env_manager")):
        _agents(peer)
    if (ratio := peer.number("async_generation_ratio")) is not None:
        peer.ours["rollout.max_head_offpolicyness"] = -int(-ratio // 1)
    _data(peer)
    if re.search(r"(?m)^sft_train:", text):
        train_on_dataset(peer, "sft")
        _whole_batch(peer, 1)
    elif re.search(r"(?m)^student_train:", text):
        _distil(peer)
    elif estimator in BY_TURN:
        credit_turns(peer, estimator)
    elif "beta" in peer.said or "chosen_key" in peer.said:
        train_on_dataset(peer, "dpo")
        _whole_batch(peer, 1)


def _distil(peer: Translation) -> None:
    """Write on-policy distillation from one teacher: the advantage of a token is its log-ratio alone."""
    path = peer.get("teacher.model_args.model_name_or_path")
    if path is None:
        peer.unknown_algorithm("teacher", f"several teachers: {_BY_TEACHER}")
        return
    coefficient = peer.number("teacher.opd_kl_coef")
    peer.ours |= {"algorithm": "distill", "teacher.path": path, "actor.reward_coef": 0.0}
    peer.ours["actor.teacher_coef"] = 1.0 if coefficient is None else coefficient
    peer.fill("teacher.backend", "the teacher is served by SGLang: write a layout such as sglang:d1t2")
    if str(peer.get("kl_penalty")) != "kl":
        peer.changes["kl_penalty"] = f"{peer.get('kl_penalty')}: the teacher's log-ratio is the estimator k1"


def _whole_batch(peer: Translation, steps: int) -> None:
    """Write the prompts of an optimizer step, which a pipeline without generation defines per device."""
    if (size := samples_per_step(peer)) is not None:
        peer.ours["train_dataset.batch_size"] = size
    else:
        peer.fill("train_dataset.batch_size", "samples of an optimizer step: the trainer's devices are unknown")
    peer.ours["actor.ppo_n_minibatches"] = steps
    if peer.get("query_key"):
        fields = f"{peer.get('prompt_key')} and {peer.get('query_key')}"
        peer.fill("train_dataset.path", f"{fields} form the prompt: join them in my_data.py:rows")


def _algorithm(peer: Translation, estimator: str) -> None:
    if estimator in _NAMES:
        peer.ours["algorithm"] = _NAMES[estimator]
    else:
        peer.unknown_algorithm("adv_estimator", f"{estimator}: {NO_ALGORITHM}")
    if peer.get("use_policy_loss_type") not in (None, "PPO"):
        peer.unknown_algorithm("use_policy_loss_type", f"{peer.get('use_policy_loss_type')}: {NO_ALGORITHM}")
    _variant(peer)
    if any(peer.keys_below("student")):
        peer.unknown_algorithm("student", _BY_TEACHER)
    peer.replay(False)  # ROLL has no key for it
    peer.ours["actor.use_decoupled_loss"] = not peer.is_on("force_disable_old_logprobs_recompute")
    peer.behaviour("disabled")
    if estimator == "gae":
        peer.ours["actor.gae_lambda"] = peer.get("lambd")
        peer.ours["critic.warmup_steps"] = peer.get("critic_warmup") or 0
        peer.ours["critic.eps_clip"] = peer.get("value_clip")


def _variant(peer: Translation) -> None:
    """Write the loss of ROLL's worker of several losses, which the actor's section names; other workers have PPO's."""
    if "actor_pg_worker" not in str(peer.get("actor_train.worker_cls")):
        return
    variant = peer.get("actor_train.pg_variant") or "vanilla"
    if variant == "topr":
        peer.ours["algorithm"] = "topr"
    elif variant != "ppo":
        peer.unknown_algorithm("actor_train.pg_variant", f"{variant}: {NO_ALGORITHM}")


def _norms(peer: Translation, estimator: str) -> None:
    kinds = {"mean_level": peer.get("norm_mean_type"), "std_level": peer.get("norm_std_type")}
    agentic = any(peer.keys_below("train_env_manager"))
    if agentic:
        kinds = _agent_norm(peer)
    elif estimator == "grpo":
        kinds = {"mean_level": "group", "std_level": "group"}
    if "running" in kinds.values():
        peer.changes["norm_mean_type"] = "running: rewards are normalised within a group or a step"
    levels = {key: kind if kind in ("group", "batch") else None for key, kind in kinds.items()}
    peer.norm("actor.reward_norm", **levels, std_unbiased=levels["std_level"] is not None)
    peer.norm("actor.adv_norm", **(BATCH_NORM if peer.is_on("whiten_advantages") else {}))
    size = "train_env_manager.group_size" if agentic else "num_return_sequences_in_group"
    clip, group = peer.number("reward_clip"), peer.number(size) or 1
    if clip and levels["std_level"] == "group" and clip * clip >= group:
        peer.unneeded["reward_clip"] = f"normalised rewards of {group} samples are smaller"
    elif clip and kinds == {"mean_level": None, "std_level": None}:
        peer.ours["actor.reward_clip"] = clip
    elif clip:
        peer.ours["actor.reward_norm.clip"] = clip


def _clips(peer: Translation) -> None:
    names = ("pg_clip_low", "pg_clip_high") if peer.is_on("use_pg_clip_range") else ("pg_clip", "pg_clip")
    peer.ours["actor.eps_clip"], peer.ours["actor.eps_clip_higher"] = map(peer.get, names)
    peer.ours["actor.c_clip"] = 1 + 2 * peer.get("pg_clip") if peer.is_on("dual_clip_loss") else None


def _masks(peer: Translation, estimator: str) -> None:
    """Write which responses are excluded from the loss; an agentic pipeline does not have such masks."""
    if any(peer.keys_below("train_env_manager")):
        return
    if peer.is_on("max_len_mask"):
        peer.ours["actor.mask_truncated"] = True
    if peer.is_on("difficulty_mask") and (peer.number("num_return_sequences_in_group") or 1) > 1:
        low, high = (peer.number(f"difficulty_{bound}_threshold") for bound in ("low", "high"))
        peer.ours["actor.group_reward_above"] = 0.0 if low is None else low
        peer.ours["actor.group_reward_below"] = 1.0 if high is None else high
    for key in ("max_len_mask", "difficulty_mask"):
        if peer.is_on(key) and (estimator == "gae" or peer.number("entropy_loss_coef")):
            peer.changes[key] = "ROLL masks the policy's loss alone; here the critic and the entropy are masked too"


def _divergence(peer: Translation) -> None:
    peer.ours["actor.kl_ctl"] = peer.get("init_kl_coef") if peer.is_on("add_token_level_kl") else 0.0
    peer.ours["actor.kl_loss_coef"] = peer.get("kl_loss_coef") if peer.is_on("use_kl_loss") else 0.0
    peer.divergence("kl_penalty", None)
    if peer.ours["actor.kl_ctl"] and peer.get("target_kl") is not None:
        peer.changes["target_kl"] = "the weight of the KL divergence is constant"


def _batches(peer: Translation) -> None:
    prompts, group = peer.get("rollout_batch_size"), peer.get("num_return_sequences_in_group")
    if any(peer.keys_below("train_env_manager")):
        group = 1  # the batch size counts trajectories
    if (size := samples_per_step(peer)) and all(isinstance(value, int) for value in (prompts, group)):
        peer.minibatches(prompts * group, size, f"{_TRAIN}.gradient_accumulation_steps")
    else:
        peer.fill("actor.ppo_n_minibatches", "optimizer steps per training step: the batch size is unknown")


def _agents(peer: Translation) -> None:
    """Write the differences of an agentic pipeline: its batch counts trajectories, and its rewards are normalised."""
    group, whole = peer.number("train_env_manager.group_size") or 1, peer.number("rollout_batch_size")
    peer.ours["gconfig.n_samples"] = group
    if isinstance(whole, int) and isinstance(group, int):
        peer.ours["train_dataset.batch_size"] = max(1, whole // group)
    if not any(peer.keys_below(_INFER)):
        for name in ("temperature", "top_p", "top_k"):
            value = peer.get(f"train_env_manager.generating_args.{name}")
            if value is not None:
                peer.ours[f"gconfig.{name}"] = ALL_WORDS.get(str(value), value) if name == "top_k" else value
    if limits := _turn_limits(peer):
        peer.ours["gconfig.max_new_tokens"] = min(limits)
    mode = peer.get("batch_adjust_mode")
    if peer.ours["algorithm"] in BY_TURN.values():
        pass  # see batch_turns
    elif mode not in (None, "copy") and not _batch_divides(peer, whole):
        peer.changes["batch_adjust_mode"] = f"{mode}: all samples of all trajectories are trained"
    if stops := peer.get(f"{_INFER}.stop_strings"):
        peer.fill("workflow", f"the agent sends stop={stops} with its requests (docs/workflows.md)")
    peer.ours["actor.importance_sampling_level"] = "token"


def _batch_divides(peer: Translation, whole: Any) -> bool:
    """Return whether trajectories are single samples that divide evenly into optimizer steps, without a remainder."""
    size = samples_per_step(peer)
    return bool(size and peer.get("max_actions_per_traj") == 1 and isinstance(whole, int) and whole % size == 0)


def _agent_norm(peer: Translation) -> dict[str, Any]:
    """Return the levels of mean and deviation with which an agentic pipeline normalises rewards."""
    grouping, tags = str(peer.get("reward_normalization.grouping") or "batch"), peer.get("train_env_manager.tags")
    if grouping == "tags" and isinstance(tags, list) and len(tags) == 1:
        grouping = "batch"  # all trajectories have the same tag
    if grouping not in ("batch", "traj_group_id"):
        peer.changes["reward_normalization.grouping"] = f"{grouping}: rewards are normalised within a group or a step"
    level = "batch" if grouping == "batch" else "group"
    method = peer.get("reward_normalization.method")
    mean = peer.get("reward_normalization.norm_mean_type") or (
        level if method in ("mean", "mean_std", "asym_clip") else None
    )
    std = peer.get("reward_normalization.norm_std_type") or (level if method in ("mean_std", "asym_clip") else None)
    return {name: level if kind == "group" else kind for name, kind in (("mean_level", mean), ("std_level", std))}


def _turn_limits(peer: Translation) -> list[float]:
    """Return the limits of a turn's tokens in an agentic pipeline, the smallest one applies."""
    if not any(peer.keys_below("train_env_manager")):
        return []
    own = _INFER if any(peer.keys_below(_INFER)) else "train_env_manager.generating_args"
    found = [peer.number("max_tokens_per_step"), peer.number(f"{own}.max_new_tokens")]
    return [value for value in found if value]


def _images(peer: Translation) -> None:
    """Write which parts of a vision-language model are trained; ROLL limits the size of images with its own keys."""
    own = "actor_train.model_args.model_name_or_path"
    if not sees_images(peer, own if peer.get(own) else "pretrain", _PATHS):
        return
    if peer.get("actor_train.model_args.freeze_module_prefix") in ("vision_model", "model.visual"):
        peer.ours["actor.freeze_vision_tower"] = True
    if not any(peer.keys_below("train_env_manager")):
        most = peer.get("actor_train.data_args.image_max_pixels") or 4096 * 4096
        write_rows(peer, f"ROLL words the prompts and shrinks images to {most} pixels")


def _data(peer: Translation) -> None:
    peer.ours["train_dataset.overlong_prompts"] = "drop"
    train, held_out = (peer.get(key) for key in _PATHS)
    files = train if isinstance(train, list) else [train] if train else []
    if len(files) == 1:
        peer.ours["train_dataset.path"] = files[0]
    elif files:
        peer.fill("train_dataset.path", f"one of {', '.join(map(str, files))}; set the others in train_dataset.mixture")
    if held_out:
        peer.ours["valid_dataset.path"] = held_out[0] if isinstance(held_out, list) else held_out
    sampling = [peer.get(f"validation.generating_args.{name}") for name in ("temperature", "top_p", "top_k")]
    peer.evaluate("evaluator", *((0.0, None, None) if peer.is_on("val_greedy") else sampling))
    _images(peer)
    if "actor_train.data_args.messages" in peer.said:
        peer.ours["train_dataset.prompt_field"] = peer.get("actor_train.data_args.messages")
    if peer.get("sequence_length") and peer.get("response_length") is None and not _turn_limits(peer):
        peer.fill("gconfig.max_new_tokens", "ROLL's sequence_length covers prompt and response together")
    if not any(peer.keys_below("train_env_manager")) and (stops := peer.get(f"{_INFER}.stop_strings")):
        peer.changes[f"{_INFER}.stop_strings"] = f"{stops}: only the model's end-of-text token ends a response"
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
        peer.adapters(rank, modules=peer.get("actor_train.model_args.lora_target"))
