"""One line on the console when a run wastes most of its time: most groups are dropped, or the trainer waits."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

REPEAT_S = 600.0  # at least, between two lines; a wait that lasts this long is reported before it ends
LOOK_S = 10.0  # between two looks at a wait
MOST = 0.5  # share of the groups, or of a step's time
CLEAR = 0.25  # share of a step that a queue must take to be the cause


@dataclass(eq=False)
class WaitingNotes:
    """Reports the cause of waiting, and the key to change, through `say`: of a step that ended, and of a long wait.

    `groups` is the number of groups that a step trains, `agents` whether a workflow plays episodes, `captured` the most
    requests that a server's CUDA graphs hold, 0 without graphs and None on a CPU. The first step is left out when it
    ends, because it starts with empty queues.
    """

    groups: int
    agents: bool
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    captured: int | None = None
    _said: float | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a step's metrics."""
        if "seconds/step" not in scalars:  # samples of an evaluation
            return
        self._steps += 1
        if self._steps > 1:
            self._report(step, scalars)

    async def watch(self, step: int, present: Callable[[], Mapping[str, float]]) -> None:
        """Report a wait for the rollouts of `step` while it lasts; runs until it is cancelled.

        `present` returns the groups dropped so far in the run, the share of servers that are idle now, and the other
        metrics of `explain` so far in this step.
        """
        began, looks, idle = self.clock(), 0, 0.0
        before = present()["rollout/dropped_groups"]
        while True:
            await asyncio.sleep(LOOK_S)
            scalars, seconds = dict(present()), self.clock() - began
            looks, idle = looks + 1, idle + scalars["idle/servers"]
            dropped = scalars["rollout/dropped_groups"] - before
            if seconds >= REPEAT_S or _mostly_dropped(dropped, self.groups):
                waited = {"seconds/step": seconds, "seconds/wait_for_rollouts": seconds, "idle/servers": idle / looks}
                self._report(step, scalars | waited | {"rollout/dropped_groups": dropped})

    def _report(self, step: int, scalars: Mapping[str, float]) -> None:
        """Report a waste, unless one was reported less than REPEAT_S ago."""
        if self._said is not None and self.clock() - self._said < REPEAT_S:
            return
        if words := explain(scalars, self.groups, agents=self.agents, captured=self.captured):
            self._said = self.clock()
            self.say(f"step {step}: {words}")


def explain(scalars: Mapping[str, float], groups: int, *, agents: bool, captured: int | None = None) -> str | None:
    """Return the waste of a step, its cause and the key to change, or None where neither limit is exceeded."""
    dropped = scalars.get("rollout/dropped_groups", 0.0)
    if _mostly_dropped(dropped, groups):
        return (
            f"{dropped:.0f} of {dropped + groups:.0f} groups were dropped, mostly because all rewards of a group are "
            "equal. Use prompts of another difficulty (train_dataset.curriculum), or raise gconfig.n_samples"
        )
    seconds = scalars["seconds/step"]
    waited = scalars.get("seconds/wait_for_rollouts", 0.0)
    if waited <= MOST * seconds:
        return None
    share = f"{waited / seconds:.0%} of the step" if waited < seconds else f"{waited / 60:.0f} min so far"
    return f"the trainer waited for rollouts for {share}: {_cause(scalars, agents=agents, captured=captured)}"


def _mostly_dropped(dropped: float, groups: int) -> bool:
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
