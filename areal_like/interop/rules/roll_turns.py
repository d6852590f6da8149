"""ROLL's estimators whose samples are turns of agents: `step_reinforce` and `gigpo`."""

import math

from areal_like.interop.rules.translation import Translation

TRAIN = "actor_train.training_args"
BY_TURN = {"step_reinforce": "turn_reinforce", "gigpo": "gigpo"}


def samples_per_step(peer: Translation) -> int | None:
    """Return the samples of an optimizer step, None where a part of the product is unknown."""
    parts = [peer.get(f"{TRAIN}.{key}") for key in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    parts.append(peer.data_parallel)
    return math.prod(parts) if all(isinstance(part, int) for part in parts) else None


def credit_turns(peer: Translation, estimator: str) -> None:
    """Write the credit and the weight of turns; each turn is a sample with its own rendered prompt."""
    peer.ours["actor.turn_discount"] = peer.get("step_reward_gamma")
    peer.ours["episode.history"] = "as_deployed"
    if peer.get("loss_agg_mode") == "seq-mean-token-mean":
        peer.ours["actor.loss_agg_mode"] = "turn_mean"
    elif peer.get("loss_agg_mode") != "token-mean":
        peer.changes["loss_agg_mode"] = f"{peer.get('loss_agg_mode')}: turns have equal weights, or tokens have"
    returned = "rewards of its turns (`turns`)"
    if estimator == "gigpo":
        returned = "`turns` and the states in which they start (`states`)"
        peer.ours["actor.state_coef"] = peer.get("step_reward_weight")
        if peer.number("episode_reward_weight") != 1:
            peer.changes["episode_reward_weight"] = (
                f"{peer.get('episode_reward_weight')}: the weight of an episode is 1"
            )
        if peer.get("reward_normalization.grouping") != "traj_group_id":
            peer.changes["reward_normalization.grouping"] = "episodes and states are compared within a group"
    peer.fill("workflow", f"write the environment as a workflow that returns {returned} (docs/workflows.md)")


def batch_turns(peer: Translation) -> None:
    """Write optimizer steps of a fixed number of turns, and the length of the schedule, which counts trajectories."""
    size, whole = samples_per_step(peer), peer.get("rollout_batch_size")
    if not size or not isinstance(whole, int):
        peer.fill("actor.turns_per_minibatch", "turns of an optimizer step: the trainer's devices are unknown")
        if (mode := peer.get("batch_adjust_mode")) not in (None, "copy"):
            peer.changes["batch_adjust_mode"] = f"{mode}: all turns are trained"
        return
    peer.ours |= {"actor.turns_per_minibatch": size, "actor.ppo_n_minibatches": 1}
    if peer.ours.get("actor.optimizer.lr_scheduler_type", "linear") != "constant":
        samples = whole * (peer.number("actor_infer.generating_args.num_return_sequences") or 1)
        steps = peer.get("max_steps") * samples * (peer.number("ppo_epochs") or 1) // size
        peer.ours["actor.optimizer.lr_decay_steps"] = max(1, steps)
    mode = peer.get("batch_adjust_mode") or "copy"
    inferred = [peer.number(f"{role}.infer_batch_size") or 1 for role in ("actor_train", "reference")]
    if mode == "copy":
        peer.unneeded["batch_adjust_mode"] = "the turns are divided evenly, so no copies fill the last optimizer step"
    elif size > 1 or any(count * (peer.data_parallel or 1) > 1 for count in inferred):
        peer.changes["batch_adjust_mode"] = f"{mode}: all turns are trained"
    else:
        peer.unneeded["batch_adjust_mode"] = "each turn has an optimizer step of its own, so none is left out"
