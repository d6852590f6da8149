"""Training on the responses of a dataset, which other systems start with a separate pipeline or command."""

from areal_like.core.algorithms.settings import KEYS
from areal_like.interop.rules.translation import MISSING, Translation

_EXAMPLES = {"sft": "answers", "dpo": "preferences"}
_OF_POLICY_GRADIENTS = tuple(f"actor.{name}" for name in (*KEYS, "reward_norm", "adv_norm"))


def train_on_dataset(peer: Translation, algorithm: str, steps: int = 1) -> None:
    """Write `algorithm`, with one optimizer step per batch; the workflow for the responses is left to the user."""
    for key in [key for key in peer.ours if key.startswith(_OF_POLICY_GRADIENTS)]:
        del peer.ours[key]
    peer.ours |= {
        "algorithm": algorithm,
        "actor.ppo_n_minibatches": steps,
        "gconfig.n_samples": 2 if algorithm == "dpo" else 1,
    }
    peer.missing.pop("actor.ppo_n_minibatches", None)
    for key in [key for key in peer.ours if key.startswith(("gconfig.top_", "gconfig.min_p"))]:
        del peer.ours[key]
    peer.ours["gconfig.temperature"] = 1.0  # for log-probs; training does not sample responses
    example = f"examples/offline/{_EXAMPLES[algorithm]}.py:run"
    peer.fill("workflow", f"{example} trains on the responses of a dataset (docs/algorithms.md)")


def imitate_in_verl(peer: Translation) -> None:
    """Write the settings of verl's trainer for supervised fine-tuning; its micro-batches count as in its RL trainer."""
    train_on_dataset(peer, "sft")
    for part, ours in (("prompt", "prompt_field"), ("response", "answer_field")):
        inner = _names(peer.get(f"data.{part}_dict_keys"))
        peer.ours[f"train_dataset.{ours}"] = ".".join([str(peer.get(f"data.{part}_key")), *inner[:1]])
    if peer.is_on("data.multiturn.enable"):
        peer.ours["train_dataset.prompt_field"] = peer.get("data.multiturn.messages_key")
        peer.ours.pop("train_dataset.answer_field")
    peer.ours |= {"actor.path": peer.get("model.path", "model.partial_pretrain") or MISSING}
    peer.ours["train_dataset.overlong_prompts"] = "refuse" if peer.get("data.truncation") == "error" else "truncate"
    peer.fill("gconfig.max_new_tokens", f"data.max_length={peer.get('data.max_length')} covers prompt and response")
    if rank := peer.number("model.lora_rank"):
        peer.ours |= {"actor.use_lora": True, "actor.lora_rank": rank, "actor.lora_alpha": peer.get("model.lora_alpha")}
        if (modules := peer.get("model.target_modules")) != "all-linear":
            peer.ours["actor.target_modules"] = _names(modules)
    betas = _names(peer.get("optim.betas"))
    peer.ours |= {"actor.optimizer.beta1": float(betas[0]), "actor.optimizer.beta2": float(betas[1])}


def _names(value: object) -> list[str]:
    """Return the items of a list, which a command line writes as text."""
    if value is None:
        return []
    parts = value if isinstance(value, list) else str(value).strip("[]()").split(",")
    return [str(part).strip(" '\"") for part in parts]
