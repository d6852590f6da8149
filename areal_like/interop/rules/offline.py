"""Training on the responses of a dataset, which other systems start with a separate pipeline or command."""

from areal_like.core.algorithms.settings import KEYS
from areal_like.interop.rules.translation import MISSING, Translation, split_list

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
    _write_fields(peer)
    peer.ours |= {"actor.path": peer.get("model.path", "model.partial_pretrain") or MISSING}
    peer.ours["train_dataset.overlong_prompts"] = "refuse" if peer.get("data.truncation") == "error" else "truncate"
    peer.fill("gconfig.max_new_tokens", f"data.max_length={peer.get('data.max_length')} covers prompt and response")
    if rank := peer.number("model.lora_rank"):
        peer.adapters(rank, peer.get("model.lora_alpha"), peer.get("model.target_modules"))
    write_optimizer(peer, "optim", "actor.optimizer")


def _write_fields(peer: Translation) -> None:
    """Write the columns of the rows: prompt and response, or messages of which the assistant's are trained."""
    if peer.get("data.messages_key") is not None or peer.is_on("data.multiturn.enable"):
        peer.ours["train_dataset.prompt_field"] = field = peer.get("data.messages_key", "data.multiturn.messages_key")
        peer.ours["train_dataset.last_assistant"] = "drop"
        peer.missing["workflow"] = f"write one that trains on the assistant's messages of {field} (docs/algorithms.md)"
        return
    for part, ours in (("prompt", "prompt_field"), ("response", "answer_field")):
        inner = split_list(peer.get(f"data.{part}_dict_keys"))
        peer.ours[f"train_dataset.{ours}"] = ".".join([str(peer.get(f"data.{part}_key")), *inner[:1]])


def write_optimizer(peer: Translation, place: str, ours: str) -> None:
    """Write the betas, warm-up and final rate of the optimizer in verl's section `place`."""
    if (betas := split_list(peer.get(f"{place}.betas"))) != []:
        peer.ours[f"{ours}.beta1"], peer.ours[f"{ours}.beta2"] = map(float, betas[:2])
    ratio, steps = peer.number(f"{place}.lr_warmup_steps_ratio"), peer.number(f"{place}.lr_warmup_steps")
    if ratio and (steps is None or steps < 0):
        peer.ours[f"{ours}.warmup_steps_proportion"] = ratio
    peer.final_rate(f"{place}.min_lr", f"{place}.lr", ours)
