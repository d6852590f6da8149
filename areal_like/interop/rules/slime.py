"""Values that follow from several of slime's options."""

import json
import re
from typing import Any

from areal_like.interop.keys.shared import NO_ALGORITHM, TRAINERS_ROUTES, VIDEO
from areal_like.interop.rules.images import sees_images
from areal_like.interop.rules.offline import train_on_dataset
from areal_like.interop.rules.translation import BATCH_NORM, GROUP_NORM, Translation

_NAMES = {"ppo": "ppo", "grpo": "grpo", "gspo": "gspo", "cispo": "cispo", "reinforce_plus_plus": "reinforce_pp"} | {
    "reinforce_plus_plus_baseline": "reinforce_pp"
}
_BY_GROUP = ("grpo", "gspo", "cispo")
_OWN_CODE = ("custom-advantage-function-path", "custom-loss-function-path", "custom-pg-loss-reducer-function-path")
_PLAIN = ("slime.rollout.sglang_rollout.generate_rollout", "fully_async_rollout.generate_rollout_fully_async")
_STREAMED = ("train_async.py", "fully_async_rollout")


def rules(peer: Translation, text: str) -> None:
    """Write the values that follow from several of slime's options."""
    estimator = str(peer.get("advantage-estimator"))
    _algorithm(peer, estimator)
    _norms(peer, estimator)
    peer.ours["actor.loss_agg_mode"] = "token_mean" if peer.is_on("calculate-per-token-loss") else "sequence_mean"
    _divergence(peer)
    peer.ours["actor.use_decoupled_loss"] = not peer.is_on("use-rollout-logprobs")
    bounds = peer.get("tis-clip"), peer.number("tis-clip-low")
    if peer.is_on("use-routing-replay") and not peer.is_on("use-rollout-routing-replay"):
        peer.changes["use-routing-replay"] = TRAINERS_ROUTES
    peer.behaviour(*("token_truncate", *bounds) if peer.is_on("use-tis") else ("disabled",))
    _batches(peer)
    peer.final_rate("min-lr", "lr")
    if estimator == "ppo":
        _critic(peer)
    if any(mark in text for mark in _STREAMED):
        peer.ours["rollout.max_head_offpolicyness"] = 1
    _user_code(peer)
    _evaluation(peer)
    _images(peer)
    if peer.get("loss-type") == "sft_loss":
        train_on_dataset(peer, "sft", peer.ours.get("actor.ppo_n_minibatches", 1))
    elif peer.is_on("debug-train-only"):
        peer.changes["debug-train-only"] = "reinforcement learning always generates responses"


def _algorithm(peer: Translation, estimator: str) -> None:
    loss = str(peer.get("loss-type") or "policy_loss")
    if loss == "sft_loss":
        if not peer.is_on("calculate-per-token-loss"):
            peer.changes["loss-type"] = "sft averages over all tokens, not over each response first"
    elif estimator in _NAMES and loss == "policy_loss":
        peer.ours["algorithm"] = _NAMES[estimator]
    else:
        peer.unknown_algorithm("advantage-estimator", f"{estimator}: {NO_ALGORITHM}")
    peer.ours["actor.importance_sampling_level"] = "sequence" if estimator == "gspo" else "token"
    for key in [key for key in _OWN_CODE if peer.get(key)]:
        peer.unknown_algorithm(key, f"{peer.get(key)}: {NO_ALGORITHM}")


def _norms(peer: Translation, estimator: str) -> None:
    centred = not peer.is_on("disable-rewards-normalization") and estimator in (
        *_BY_GROUP,
        "reinforce_plus_plus_baseline",
    )
    divided = not peer.is_on("disable-grpo-std-normalization") and peer.get("n-samples-per-prompt") != 1
    norm = GROUP_NORM if divided and estimator in _BY_GROUP else {"mean_level": "group"}
    peer.norm("actor.reward_norm", **(norm if centred else {}))
    peer.norm("actor.adv_norm", **(BATCH_NORM if peer.is_on("normalize-advantages") else {}))


def _divergence(peer: Translation) -> None:
    in_loss = peer.get("kl-loss-coef") if peer.is_on("use-kl-loss") else 0.0
    in_reward = peer.get("kl-coef")
    if in_reward and str(peer.get("advantage-estimator")) in _BY_GROUP:
        peer.unneeded["kl-coef"], in_reward = "slime's group estimators do not subtract it from the reward", 0.0
    peer.ours |= {"actor.kl_loss_coef": in_loss, "actor.kl_ctl": in_reward}
    peer.divergence("kl-loss-type", "kl-loss-type")


def _batches(peer: Translation) -> None:
    steps = peer.get("num-steps-per-rollout")
    if steps is not None:
        peer.ours["actor.ppo_n_minibatches"] = steps
        return
    prompts, group = peer.get("rollout-batch-size"), peer.get("n-samples-per-prompt")
    whole = prompts * group if isinstance(prompts, int) and isinstance(group, int) else None
    peer.minibatches(whole, peer.get("global-batch-size") or whole, "global-batch-size")


def _critic(peer: Translation) -> None:
    peer.ours["critic.eps_clip"] = peer.get("value-clip")
    peer.ours["actor.gae_lambda"] = peer.get("lambd")
    peer.ours["critic.warmup_steps"] = peer.get("num-critic-only-steps") or 0
    if peer.get("critic-load"):
        peer.unneeded["critic-load"] = "the critic starts from the actor's weights; critic.path names others"
    if peer.get("critic-lr"):
        peer.ours["critic.optimizer.lr"] = peer.get("critic-lr")


def _read_json(peer: Translation, key: str, ours: str) -> dict[str, Any] | None:
    """Return the mapping that an option has as JSON, None without it; another text leaves our key to the user."""
    if (text := peer.get(key)) is None:
        return None
    try:
        return dict(json.loads(str(text)))
    except (TypeError, ValueError):
        peer.fill(ours, f"{text} is not JSON")
        return None


def _images(peer: Translation) -> None:
    """Write the column of images, which slime names in JSON by kind."""
    sees_images(peer, "hf-checkpoint", ("prompt-data",), "multimodal-keys")
    columns = _read_json(peer, "multimodal-keys", "train_dataset.image_field") or {}
    if "image" in columns:
        peer.ours["train_dataset.image_field"] = columns.pop("image")
    if columns:
        peer.changes["multimodal-keys"] = f"{', '.join(columns)}: {VIDEO}"


def _user_code(peer: Translation) -> None:
    variables = _read_json(peer, "apply-chat-template-kwargs", "train_dataset.chat_template_kwargs")
    if variables is not None:
        peer.ours["train_dataset.chat_template_kwargs"] = variables
    if (path := peer.get("rollout-function-path")) and not str(path).endswith(_PLAIN):
        peer.fill("workflow", f"{path}: write it as a function (docs/workflows.md)")
    for key in ("custom-generate-function-path", "custom-generate-function"):
        if peer.get(key):
            peer.fill("workflow", f"{peer.get(key)}: write it as a function (docs/workflows.md)")
    own = peer.get("custom-rm-path") or peer.get("rm-url")
    kind = str(peer.get("rm-type"))
    peer.fill(
        "reward.function", f"{own or f'rm-type {kind}'}: write it as my_rewards.py:score, which takes (response, row)"
    )
    filtering = peer.get("dynamic-sampling-filter-path")
    if filtering:
        peer.ours["actor.dynamic_sampling"] = True
        if not str(filtering).endswith("check_reward_nonzero_std"):
            peer.changes["dynamic-sampling-filter-path"] = f"{filtering}: only groups of equal rewards are replaced"


def _evaluation(peer: Translation) -> None:
    """Write the evaluation sets, NAME PATH each, and their sampling: the rollouts' where nothing else is set."""
    names = ("temperature", "top-p", "top-k")
    peer.evaluate("evaluator", *(peer.get(f"eval-{name}", f"rollout-{name}") for name in names))
    held_out = peer.get("eval-prompt-data")
    if peer.get("eval-config") is not None:
        peer.fill("valid_dataset.path", f"{peer.get('eval-config')} describes the evaluation sets, and was not read")
        return
    if held_out is None:
        return
    parts = list(map(str, held_out)) if isinstance(held_out, list) else str(held_out).split()
    if len(parts) % 2:
        peer.fill("valid_dataset.path", f"{' '.join(parts)}: slime takes a name and a path for each set")
        return
    (_, peer.ours["valid_dataset.path"]), *others = zip(parts[::2], parts[1::2], strict=True)
    for name, path in others:
        peer.ours[f"evaluator.datasets.{re.sub(r'[^\w-]+', '_', name)}.path"] = path
