"""Values that follow from several of Trinity-RFT's keys."""

import re
from collections.abc import Iterator
from typing import Any

from areal_like.interop.keys.shared import NO_ALGORITHM
from areal_like.interop.rules.images import sees_images
from areal_like.interop.rules.translation import BATCH_NORM, GROUP_NORM, Translation, split_list
from areal_like.interop.rules.verl import AGGREGATIONS, optimizers, replays_routes

_TASKS = "buffer.explorer_input.taskset"
_TYPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {  # preset, reward_norm, adv_norm, kl_loss_fn
    "ppo": ("ppo", {}, BATCH_NORM, "k2"),
    "grpo": ("grpo", GROUP_NORM, {}, "k2"),
    "dapo": ("grpo", GROUP_NORM, {}, "none"),
    "gspo": ("gspo", GROUP_NORM, {}, "k2"),
    "cispo": ("cispo", GROUP_NORM, {}, "k2"),
    "sapo": ("sapo", GROUP_NORM, {}, "k2"),
    "rloo": ("rloo", {"mean_level": "group", "mean_leave1out": True}, {}, "k2"),
    "reinforceplusplus": ("reinforce_pp", {}, BATCH_NORM, "k2"),
}
_CLIPS = {
    "gspo": (3e-4, 4e-4, None, "sequence_mean"),
    "cispo": (1.0, 0.28, None, "token_mean"),
    "sapo": (0.2, 0.2, None, "token_mean"),
}
_ADVANTAGES = {"ppo": "ppo", "rloo": "rloo", **dict.fromkeys(("grpo", "dapo", "gspo", "cispo", "sapo"), "grpo")}
_MOST_SETS = 100
_PLAIN_WORKFLOWS = ("math_workflow", "simple_workflow", "async_math_workflow", "async_simple_workflow")


def rules(peer: Translation, text: str) -> None:
    """Write the values that follow from several of Trinity-RFT's keys."""
    kind = str(peer.get("algorithm.algorithm_type")).lower()
    _algorithm(peer, kind)
    _loss(peer, kind)
    _divergence(peer, kind)
    peer.ours["actor.use_decoupled_loss"] = kind != "cispo" and not peer.is_on("algorithm.bypass_old_logprobs")
    peer.behaviour("disabled")
    peer.replay(any(_replays(peer)))
    peer.ours["actor.entropy_coeff"] = (
        0.0
        if peer.said.get("algorithm.entropy_loss_fn", "default") in (None, "none")
        else peer.get("algorithm.entropy_loss_fn_args.entropy_coef")
    )
    _batches(peer)
    _weights(peer)
    if (betas := peer.get("algorithm.optimizer.betas")) is not None:
        peer.ours["actor.optimizer.beta1"], peer.ours["actor.optimizer.beta2"] = map(float, split_list(betas)[:2])
    optimizers(peer, "trainer.trainer_config.")
    _tasks(peer)


def _replays(peer: Translation) -> Iterator[bool]:
    """Yield whether Trinity-RFT's own key, and verl's in its two places, replay the servers' routes."""
    yield peer.is_on("algorithm.enable_router_replay")
    for place in ("", "trainer.trainer_config."):
        yield replays_routes(peer, place)


def _algorithm(peer: Translation, kind: str) -> None:
    name, reward_norm, adv_norm, _ = _TYPES.get(kind, ("???", {}, {}, "none"))
    peer.ours["algorithm"] = name
    if kind not in _TYPES:
        peer.unknown_algorithm("algorithm.algorithm_type", f"{kind}: {NO_ALGORITHM}")
    own = peer.get("algorithm.advantage_fn")
    if own not in (None, kind, _ADVANTAGES.get(kind)):
        peer.unknown_algorithm("algorithm.advantage_fn", f"{own}: {NO_ALGORITHM}")
    level = peer.get("algorithm.advantage_fn_args.std_cal_level")
    if level and reward_norm.get("std_level"):
        reward_norm = {**reward_norm, "std_level": level}
    peer.norm("actor.reward_norm", **reward_norm)
    peer.norm("actor.adv_norm", **adv_norm)
    if peer.get("algorithm.advantage_fn_args.std_threshold") is not None:
        peer.changes["algorithm.advantage_fn_args.std_threshold"] = (
            "groups of equal rewards are replaced (actor.dynamic_sampling), not left out"
        )
    if name == "ppo":
        peer.ours["actor.gae_lambda"] = peer.get("algorithm.advantage_fn_args.lam")
        peer.ours["critic.warmup_steps"] = peer.get("trainer.critic_warmup") or 0


def _loss(peer: Translation, kind: str) -> None:
    place = "algorithm.policy_loss_fn_args"
    low, high, dual, mode = _CLIPS.get(kind, (0.2, 0.2, 3.0, "token_mean"))
    both = peer.get(f"{place}.clip_range")
    given = {"low": peer.get(f"{place}.clip_range_low"), "high": peer.get(f"{place}.clip_range_high")}
    peer.ours["actor.eps_clip"] = next(v for v in (given["low"], both, low) if v is not None)
    peer.ours["actor.eps_clip_higher"] = next(v for v in (given["high"], both, high) if v is not None)
    peer.ours["actor.c_clip"] = peer.get(f"{place}.clip_ratio_c") or dual
    peer.ours["actor.importance_sampling_level"] = "sequence" if kind == "gspo" else "token"
    own = peer.get("algorithm.policy_loss_fn")
    if kind == "sapo":
        peer.ours |= {f"actor.sapo_{tau}": peer.get(f"{place}.{tau}") for tau in ("tau_pos", "tau_neg")}
        peer.changes["algorithm.algorithm_type"] = (
            "sapo: Trinity-RFT multiplies log-probs by the gate, without its gradient; sapo here is the paper's "
            "objective, whose gradient is half of that at ratio 1"
        )
    if own not in (None, "ppo", kind):
        peer.unknown_algorithm("algorithm.policy_loss_fn", f"{own}: {NO_ALGORITHM}")
    keys = ("algorithm.loss_agg_mode", f"{place}.loss_agg_mode")
    if (said := peer.get(*keys)) is not None:
        mode = AGGREGATIONS.get(str(said), "constant")
        if str(said) not in AGGREGATIONS:
            peer.changes[keys[1]] = f"{said}: actor.loss_agg_mode is {', '.join(AGGREGATIONS.values())}"
    if peer.get(f"{place}.use_token_level_loss", "algorithm.use_token_level_loss") is False:
        mode = "sequence_mean"
    peer.ours["actor.loss_agg_mode"] = mode


def _divergence(peer: Translation, kind: str) -> None:
    default, kinds = _TYPES.get(kind, ("", {}, {}, "none"))[3], dict[str, str]()
    for place, ours, own in (
        ("algorithm.kl_penalty_fn", "actor.kl_ctl", "none"),
        ("algorithm.kl_loss_fn", "actor.kl_loss_coef", default),
    ):
        kinds[ours] = name = str(peer.get(place)) if place in peer.said else own  # "none" is read as null
        weight = 0.0 if name in ("none", "None") else peer.get(f"{place}_args.kl_coef")
        peer.ours[ours] = weight
    peer.estimator(
        ("algorithm.kl_penalty_fn", kinds["actor.kl_ctl"]), ("algorithm.kl_loss_fn", kinds["actor.kl_loss_coef"])
    )


def _batches(peer: Translation) -> None:
    prompts, group = peer.get("buffer.batch_size"), peer.get("algorithm.repeat_times")
    whole = prompts * group if isinstance(prompts, int) and isinstance(group, int) else None
    trained = peer.get("buffer.train_batch_size") or whole
    if trained != whole:
        peer.changes["buffer.train_batch_size"] = f"{trained}: a step trains the {whole} samples that it generates"
    peer.ours["actor.ppo_n_minibatches"] = 1


def _weights(peer: Translation) -> None:
    every = peer.get("synchronizer.sync_interval")
    if every != 1:
        peer.changes["synchronizer.sync_interval"] = f"{every}: weights are sent after every step"
    offset = peer.get("synchronizer.sync_offset") or 0
    bound = (every - 1 if isinstance(every, int) else 0) + offset
    peer.ours["rollout.max_head_offpolicyness"] = bound
    if str(peer.get("mode")) == "colocate":
        peer.ours["rollout.sharing"] = "alternate"


def _tasks(peer: Translation) -> None:
    peer.ours["train_dataset.shuffle"] = False
    sees_images(peer, "model.model_path", (f"{_TASKS}.path",), f"{_TASKS}.format.image_key")
    keys = ("buffer.explorer_input.default_workflow_type", f"{_TASKS}.default_workflow_type")
    workflow = peer.get(*keys)
    if workflow and str(workflow) not in _PLAIN_WORKFLOWS:
        peer.fill("workflow", f"{workflow} is a Trinity-RFT class: write a function (docs/workflows.md)")
    own = peer.get("buffer.explorer_input.default_reward_fn_type", f"{_TASKS}.default_reward_fn_type")
    if "gsm8k" in str(peer.get(f"{_TASKS}.path")) and own in (None, "math_reward"):
        peer.ours["reward.type"] = "gsm8k"
    elif own:
        peer.fill("reward.function", f"{own}: write it as my_rewards.py:score, which takes (response, row)")
    arguments = [key for key, value in peer.keys_below(f"{_TASKS}.workflow_args") if value not in (None, False)]
    if arguments and "workflow" not in peer.missing:
        peer.fill("workflow", f"{', '.join(arguments)}: write the workflow's arguments in its code (docs/workflows.md)")
    rank = peer.number("model.lora_configs.0.lora_rank")
    if rank:
        peer.adapters(rank, peer.get("model.lora_configs.0.lora_alpha") or 16)
    whole, response = peer.number("model.max_model_len"), peer.number("model.max_response_tokens")
    if whole and response and peer.get("model.max_prompt_tokens") is None:
        peer.ours["train_dataset.max_prompt_length"] = max(1, whole - response)
    cut = peer.said.get("model.enable_prompt_truncation", True)
    peer.ours["train_dataset.overlong_prompts"] = "truncate" if cut else "refuse"
    _evaluation(peer)


def _evaluation(peer: Translation) -> None:
    """Write the evaluation sets, each with its own sampling: the model's where nothing else is set."""
    place = "buffer.explorer_input.eval_tasksets"
    names = {
        "path": "path",
        "split": "split",
        "subset_name": "name",
        "format.prompt_key": "prompt_field",
        "format.response_key": "answer_field",
        "format.system_prompt": "system_prompt",
    }
    for number in range(_MOST_SETS):
        if (path := peer.get(f"{place}.{number}.path")) is None:
            return
        named = re.sub(r"[^\w-]+", "_", str(peer.get(f"{place}.{number}.name") or f"set_{number + 1}"))
        section = f"evaluator.datasets.{named}" if number else "valid_dataset"
        for theirs, ours in names.items():
            if (value := peer.get(f"{place}.{number}.{theirs}")) is not None:
                peer.ours[f"{section}.{ours}"] = value
        own, model = f"{place}.{number}.rollout_args", "model"
        sampling = {name: peer.get(f"{own}.{name}", f"{model}.{name}") for name in ("temperature", "top_p", "top_k")}
        kind = "evaluator" if section == "valid_dataset" else section
        temperature = 1.0 if sampling["temperature"] is None else sampling["temperature"]
        peer.evaluate(kind, temperature, sampling["top_p"], sampling["top_k"])
        peer.ours[f"{kind}.n_samples"] = peer.number(f"{own}.n", f"{place}.{number}.repeat_times") or 1
        peer.renamed[f"{place}.{number}.path"] = f"now {section}.path, which is {path}"
