"""The causes of wasted time: most groups are dropped, or the trainer waits."""

from collections.abc import Mapping

from areal_like.capabilities.operations.alerts import Alert

MOST = 0.5  # share of the groups, or of a step's time
CLEAR = 0.25  # share of a step that a queue must take to be the cause


def explain(
    scalars: Mapping[str, float], groups: int, *, agents: bool, captured: int | None = None, drains: bool = False
) -> Alert | None:
    """Return the waste of a step, its cause and the key to change, or None where neither limit is exceeded.

    `groups` is the number of groups that a step trains, `agents` whether a workflow plays episodes, `captured` the most
    requests that a server's CUDA graphs hold, 0 without graphs and None on a CPU, `drains` whether a weight update
    waits until all requests have ended (`weight_update.requests`), so that it takes the time in which the trainer
    waits.
    """
    dropped = scalars.get("rollout/dropped_groups", 0.0)
    if mostly_dropped(dropped, groups):
        return Alert(
            "dropped-groups",
            f"{dropped:.0f} of {dropped + groups:.0f} groups were dropped, mostly because all rewards of a group are "
            "equal. Use prompts of another difficulty (train_dataset.curriculum), or raise gconfig.n_samples",
        )
    seconds = scalars["seconds/step"]
    # where no response is long, the trainer would wait as long for the next ones
    drains = drains and scalars.get("rollout/longest_seconds", 0.0) > MOST * seconds
    drained = scalars.get("seconds/weight_update", 0.0) if drains else 0.0
    waited = scalars.get("seconds/wait_for_rollouts", 0.0) + drained
    if waited <= MOST * seconds:
        return None
    share = f"{waited / seconds:.0%} of the step" if waited < seconds else f"{waited / 60:.0f} min so far"
    if drained > waited / 2:
        cause = "each weight update waits until the longest response has ended. Set weight_update.requests=in_place"
    else:
        cause = _cause(scalars, agents=agents, captured=captured)
    return Alert("idle-trainer", f"the trainer waited for rollouts for {share}: {cause}")


def mostly_dropped(dropped: float, groups: int) -> bool:
    """Return whether more groups were dropped than a step trains."""
    return dropped > MOST * (dropped + groups)


def _cause(scalars: Mapping[str, float], *, agents: bool, captured: int | None) -> str:
    seconds, idle = scalars["seconds/step"], scalars.get("idle/servers", 0.0)
    if scalars.get("reward/queue_seconds_mean", 0.0) > CLEAR * seconds:
        return "rewards are slow, and responses wait for a free reward process. Raise reward.workers"
    if scalars.get("rollout/queue_seconds_mean", 0.0) > CLEAR * seconds:
        return "requests wait for the servers. Give the servers more GPUs (rollout.backend)"
    if scalars.get("rollout/longest_seconds", 0.0) > MOST * seconds:
        return "a few long responses delay the step. Lower gconfig.max_new_tokens, or set rollout.oversampling"
    if idle > MOST:
        if agents:
            return (
                "agents or their tools are slow, and the servers are idle. Raise rollout.max_concurrent_rollouts or "
                "rollout.max_head_offpolicyness"
            )
        return "the servers have few requests. Raise rollout.max_head_offpolicyness or train_dataset.batch_size"
    if captured is not None and scalars.get("rollout/running", 0.0) > captured:
        return _without_graphs(scalars["rollout/running"], captured)
    return "the servers are slower than the trainer. Give the servers more GPUs (rollout.backend)"


def _without_graphs(running: float, captured: int) -> str:
    if not captured:
        return "decoding passes run without CUDA graphs. Leave out sglang.extra_args.disable_cuda_graph"
    return (
        f"decoding passes of {running:.0f} requests run without CUDA graphs, which hold {captured}. Set "
        f"sglang.max_running_requests={captured}, or raise sglang.extra_args.cuda_graph_max_bs_decode"
    )
