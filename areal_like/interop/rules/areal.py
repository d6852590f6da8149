"""Values that follow from several of AReaL's keys."""

from areal_like.interop.keys.shared import NO_ALGORITHM
from areal_like.interop.rules.images import sees_images, write_rows
from areal_like.interop.rules.offline import train_on_dataset
from areal_like.interop.rules.translation import Translation

_NORM = {"mean_level": "batch", "std_level": "batch", "mean_leave1out": False, "std_unbiased": True}
_GSM8K_ROWS = 7473  # of the training split
_OTHER_TRAINING = {"sft": "sft", "dpo": "dpo", "rw": None, "rm": None}


def rules(peer: Translation, text: str) -> None:
    """Write the values that follow from several of AReaL's keys."""
    _algorithm(peer)
    for name in ("reward_norm", "adv_norm"):
        _norm(peer, name)
    _behaviour(peer)
    _reference(peer)
    _data(peer)
    if peer.get("actor.overlong_reward_penalty"):
        peer.ours["actor.overlong_penalty_factor"] = peer.get("actor.overlong_penalty_factor")
        peer.ours["actor.overlong_tokens"] = peer.get("actor.overlong_tokens")
    if peer.get("dynamic_bs"):
        peer.changes["dynamic_bs"] = (
            "filtered groups shrink the batch there; actor.dynamic_sampling replaces groups of equal rewards"
        )
    temperature = peer.get("actor.temperature")
    if temperature is not None and temperature != peer.get("gconfig.temperature"):
        peer.changes["actor.temperature"] = "the trainer's log-probs always use gconfig.temperature"
    _rollouts(peer)
    _evaluation(peer)
    for section in ("saver", "evaluator"):
        _frequency(peer, section)
    if own := _OTHER_TRAINING.get(str(peer.get("train_dataset.type"))):
        train_on_dataset(peer, own)


def _algorithm(peer: Translation) -> None:
    kind = str(peer.get("train_dataset.type") or "rl")
    if kind in _OTHER_TRAINING:
        own = _OTHER_TRAINING[kind]
        if own is None:
            peer.changes["train_dataset.type"] = "reward models are not trained"
            peer.fill("algorithm", "training reward models is not supported")
        return
    peer.ours["algorithm"] = "ppo" if any(peer.keys_below("critic")) else "grpo"
    if peer.get("actor.use_sapo_loss"):
        peer.ours |= {"algorithm": "sapo", "actor.loss_agg_mode": "token_mean"}
    if peer.get("actor.m2_threshold") is not None:
        peer.unknown_algorithm("actor.m2_threshold", f"M2PO: {NO_ALGORITHM}")
    own, actors = peer.get("critic.ppo_n_minibatches"), peer.get("actor.ppo_n_minibatches")
    if any(peer.keys_below("critic")) and (own or 4) != actors:
        peer.changes["critic.ppo_n_minibatches"] = f"the critic uses the actor's mini-batches, {actors}"


def _norm(peer: Translation, name: str) -> None:
    """Write a normalisation: an absent norm means none; a section without a level has AReaL's default."""
    given = {key.rpartition(".")[2]: value for key, value in peer.keys_below(f"actor.{name}")}
    if not given:
        peer.norm(f"actor.{name}")
        return
    levels = {key: given.get(key, default) for key, default in _NORM.items()}
    if levels["std_level"] is None:
        levels["std_unbiased"] = False
    peer.norm(f"actor.{name}", **levels)
    size = given.get("group_size")
    if "group" in (levels["mean_level"], levels["std_level"]) and size not in (None, peer.get("gconfig.n_samples")):
        peer.changes[f"actor.{name}.group_size"] = "a group has gconfig.n_samples responses"


def _behaviour(peer: Translation) -> None:
    """Write the clip's centre and the behaviour weight."""
    decoupled, recomputed = peer.is_on("actor.use_decoupled_loss"), peer.is_on("actor.recompute_logprob")
    peer.ours["actor.use_decoupled_loss"] = decoupled or recomputed
    if not decoupled:  # the trainer's or the servers' log-probs, without another weight
        peer.behaviour("disabled")
        return
    cap = peer.get("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")
    if cap is not None:
        mode = peer.get("actor.behave_imp_weight_mode") or "token_mask"
        peer.behaviour(str(mode).replace("sequence", "geometric"), cap)
        return
    prefix = "actor.rejection_sampling"
    if not any(value is not None for _, value in peer.keys_below(prefix)):
        peer.behaviour("disabled")
        return
    action = {"mask": "mask", "clamp": "truncate"}.get(str(peer.get(f"{prefix}.action") or "mask"))
    level = {"token": "token", "sequence": "geometric"}.get(str(peer.get(f"{prefix}.level") or "token"))
    peer.behaviour(f"{level}_{action}", peer.get(f"{prefix}.upper") or 5.0, peer.number(f"{prefix}.lower"))
    same = {"metric": ("ratio", None), "agg": ("mean", None)}
    for name, values in same.items():
        if (value := peer.get(f"{prefix}.{name}")) not in values:
            peer.changes[f"{prefix}.{name}"] = f"{value}: only the mean ratio is supported"


def _reference(peer: Translation) -> None:
    weight = peer.number("actor.kl_ctl") or 0
    if str(peer.get("train_dataset.type")) in _OTHER_TRAINING:
        weight = 0
    if weight and not any(peer.keys_below("ref")):
        peer.changes["actor.kl_ctl"] = (
            f"{weight} without a reference: AReaL subtracts that share of the log-probs from the reward; areal-like subtracts nothing"
        )
        weight = 0
    peer.ours["actor.kl_ctl"] = weight
    estimator = str(peer.get("actor.kl_estimator"))
    if weight and estimator != "k1":
        note = f"{estimator}: only k1 in the reward has the gradient of the divergence; k1 is used"
        peer.changes["actor.kl_estimator"] = note
        peer.ours["actor.kl_estimator"] = "k1"


def _data(peer: Translation) -> None:
    longest = peer.get("train_dataset.max_length")
    if longest is not None:
        peer.ours |= {"train_dataset.max_prompt_length": longest, "train_dataset.overlong_prompts": "drop"}
    if sees_images(peer, "actor.path", ("train_dataset.path", "valid_dataset.path")):
        write_rows(peer, f"AReaL's code for {peer.get('train_dataset.path')} words the prompts and crops the images")
    for data in ("train_dataset", "valid_dataset"):
        if str(peer.get(f"{data}.path")).rstrip("/").endswith("gsm8k"):
            peer.ours[f"{data}.name"] = "main"
            peer.ours[f"{data}.prompt_suffix"] = "\nPlease put your final answer within \\boxed{}."
            peer.ours["reward.type"] = "gsm8k"
    if peer.get("rollout.agent.mode") not in (None, "inline"):
        peer.fill(
            "workflow", "an agent behind an endpoint: set episode.endpoint, and write a function that waits for it"
        )
    for key in ("workflow", "rollout.agent.agent_cls_path"):
        if (named := peer.get(key)) and ":" not in str(named):
            peer.fill("workflow", f"{named} is an AReaL class: write a function (docs/workflows.md)")


def _rollouts(peer: Translation) -> None:
    most, group = peer.get("rollout.max_concurrent_rollouts"), peer.get("gconfig.n_samples")
    if isinstance(most, int) and isinstance(group, int):  # AReaL counts groups, areal-like samples
        peer.ours["rollout.max_concurrent_rollouts"] = most * group
    parser = peer.said.get("rollout.agent.tool_call_parser")
    if parser:
        peer.ours["episode.tool_call_parser"] = parser


def _evaluation(peer: Translation) -> None:
    """Write the sampling of evaluations: `eval_gconfig`, or as in training; AReaL's script for GSM8K has its own."""
    own = {name: peer.get(f"eval_gconfig.{name}", f"gconfig.{name}") for name in ("temperature", "top_p", "top_k")}
    if not any(peer.keys_below("eval_gconfig")) and peer.ours.get("reward.type") == "gsm8k":
        own["temperature"] = 0.6
        peer.renamed["evaluator.temperature"] = "0.6, as AReaL's training script for GSM8K sets it"
    if peer.is_on("eval_gconfig.greedy"):
        own["temperature"] = 0.0
    peer.evaluate("evaluator", own["temperature"], own["top_p"], own["top_k"])
    peer.ours["evaluator.n_samples"] = peer.get("eval_gconfig.n_samples", "gconfig.n_samples")
    if "evaluator.freq_steps" not in peer.ours:
        peer.ours["evaluator.at_start"] = False


def _frequency(peer: Translation, section: str) -> None:
    """Write a frequency in steps for one in epochs, which needs the number of rows; the last step always counts."""
    epochs, seconds = peer.number(f"{section}.freq_epochs"), peer.number(f"{section}.freq_secs")
    if peer.ours.get(f"{section}.freq_steps") is not None or (epochs is None and seconds is None):
        return
    if section == "evaluator" and "valid_dataset.path" not in peer.ours:
        return
    rows, batch = _GSM8K_ROWS, peer.get("train_dataset.batch_size")
    if seconds is None and epochs is not None and epochs >= (peer.get("total_train_epochs") or 1):
        peer.unneeded[f"{section}.freq_epochs"] = "the last step is always included"
    elif seconds is None and epochs is not None and peer.ours.get("reward.type") == "gsm8k" and isinstance(batch, int):
        peer.ours[f"{section}.freq_steps"] = steps = max(1, round(epochs * rows / batch))
        peer.renamed[f"{section}.freq_epochs"] = f"now {section}.freq_steps={steps}, for {rows} rows"
    else:
        every = f"every {epochs} epochs" if seconds is None else f"every {seconds} seconds"
        peer.fill(f"{section}.freq_steps", f"{every}: set the training steps between two")
