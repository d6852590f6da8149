"""The part of the capability in the loop: alerts, memory, and utilization."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from allocation.model_spec import ModelSpec
from allocation.parameters import flops_per_token
from areal_like.capabilities.operations.advice import split_of
from areal_like.capabilities.operations.alerts import Alert, Console, Trends, stuck
from areal_like.capabilities.operations.memory import ProcessMemory
from areal_like.capabilities.operations.processes import resident, resident_of_workers
from areal_like.capabilities.operations.waiting import explain, mostly_dropped
from areal_like.capability import Started
from areal_like.core.hooks import Hook, TrainingStep
from areal_like.core.loop.logprob_check import allowed_logprob_diff
from areal_like.core.types import Trajectory
from areal_like.job import Job
from areal_like.preflight.memory import gpu_bytes
from areal_like.preflight.step_time import find_gpu
from areal_like.run.startup_report import find_captured

TRAINED, GENERATED = 3, 1  # passes of a token: forward, and a backward pass that is two; forward alone


@dataclass(frozen=True)
class Utilization:
    """The GPUs of trainer and servers, the FLOP/s of each, None if unknown, and the model that they compute."""

    trainer: int
    servers: int
    model: ModelSpec | None
    flops: float | None

    def of_step(self, scalars: Mapping[str, float], prompt: float) -> dict[str, float]:
        """Return the metrics of a step whose prompts have `prompt` tokens in the mean."""
        seconds, response = scalars["seconds/step"], scalars.get("rollout/response_length", 0.0)
        trained = scalars.get("train/tokens", 0.0) / seconds / self.trainer
        generated = scalars.get("throughput/rollout_tokens_per_second", 0.0) / self.servers
        found = {
            "throughput/train_tokens_per_gpu_second": trained,
            "throughput/rollout_tokens_per_gpu_second": generated,
        }
        if self.model is None or self.flops is None or not response:
            return found
        share = response / (prompt + response)  # of tokens that need the output layer
        train = 2 * TRAINED * flops_per_token(self.model, prompt + response, share)
        serve = 2 * GENERATED * flops_per_token(self.model, 2 * prompt + response, 1.0)  # mean context of a response
        return found | {"mfu/trainer": trained * train / self.flops, "mfu/servers": generated * serve / self.flops}


def make_utilization(job: Job) -> Utilization | None:
    """Return the GPUs of a run, None on a CPU."""
    if job.device == "cpu":
        return None
    size = gpu_bytes()
    trainer, servers = (len({*job.plan.engine(role).devices}) for role in ("actor", "rollout"))
    return Utilization(trainer, servers, job.models.get("actor"), find_gpu(size).flops if size else None)


LOOK_S = 10.0  # between two looks at a wait
LONG_S = 600.0  # a wait that lasts as long is reported before it ends
IN_ROW = 3  # steps that waste their time for the same cause, until it is reported

type Present = Callable[[], Mapping[str, float]]


@dataclass(eq=False)
class Operations(Hook):
    """Reports problems of a run, and measures its processes.

    `groups` is the number of groups that a step trains, `agents` whether a workflow plays episodes, `captured` the most
    requests that a server's CUDA graphs hold, 0 without graphs and None on a CPU, `drains` whether weight updates wait
    for all requests.
    """

    console: Console
    trends: Trends
    memory: ProcessMemory
    utilization: Utilization | None
    groups: int
    agents: bool
    captured: int | None = None
    drains: bool = False
    _prompt: float = field(default=0.0, init=False)
    _steps: int = field(default=0, init=False)
    _wasted: list[str] = field(default_factory=list, init=False)  # kinds of the last steps in a row

    async def while_waiting(self, step: int, present: Present) -> None:
        """Report the cause of a long wait, and a group that does not end, while it lasts."""
        began, looks, idle = self.console.clock(), 0, 0.0
        before = present()["rollout/dropped_groups"]
        while True:
            await asyncio.sleep(LOOK_S)
            scalars, seconds = dict(present()), self.console.clock() - began
            looks, idle = looks + 1, idle + scalars["idle/servers"]
            dropped = scalars["rollout/dropped_groups"] - before
            if seconds >= LONG_S or mostly_dropped(dropped, self.groups):
                waited = {"seconds/step": seconds, "seconds/wait_for_rollouts": seconds, "idle/servers": idle / looks}
                waste = self._explain(scalars | waited | {"rollout/dropped_groups": dropped})
                self.console.report(step, waste)
            self.console.report(step, stuck(scalars.get("rollout/oldest_group_seconds", 0.0), 0.0))

    async def before_step(self, step: TrainingStep) -> None:
        """Measure how rewards and lengths of a group are related, and read the memory of processes."""
        if step.trajectories:
            self._prompt = float(np.mean([len(item.tokens) - item.response_length for item in step.trajectories]))
            tied = reward_length_correlation(step.trajectories)
            step.measured |= {} if tied is None else {"rollout/reward_length_correlation": tied}
        await self.memory.look()

    def statistics(self) -> Mapping[str, float]:
        """Return the resident memory by process."""
        return self.memory.metrics()

    def derive_metrics(self, step: int, scalars: Mapping[str, float]) -> Mapping[str, float]:
        """Report alerts; return the utilization of the GPUs."""
        self._steps += 1
        if self._steps > 1:  # the first step starts with empty queues
            waste = self._explain(scalars)
            same = waste is not None and self._wasted[-1:] == [waste.kind]
            self._wasted = [*(self._wasted[-IN_ROW:] if same else ()), *([waste.kind] if waste else ())]
            self.console.report(step, waste if len(self._wasted) >= IN_ROW else None)
        for alert in (*self.trends.look(step, scalars), self.memory.growing()):
            self.console.report(step, alert)
        return self.utilization.of_step(scalars, self._prompt) if self.utilization else {}

    def _explain(self, scalars: Mapping[str, float]) -> Alert | None:
        return explain(scalars, self.groups, agents=self.agents, captured=self.captured, drains=self.drains)


def reward_length_correlation(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the correlation of rewards and response lengths within groups, None where one of them does not vary."""
    rewards, lengths = list[float](), list[float]()
    judged = sorted((item for item in trajectories if item.reward is not None), key=lambda item: item.group_id)
    for _, members in groupby(judged, key=lambda item: item.group_id):
        own = [(float(item.reward or 0.0), float(item.response_length)) for item in members]
        means = np.mean(own, axis=0)
        rewards += [reward - means[0] for reward, _ in own]
        lengths += [length - means[1] for _, length in own]
    scale = float(np.linalg.norm(rewards) * np.linalg.norm(lengths))
    return float(np.dot(rewards, lengths)) / scale if scale else None


def make_operations(started: Started) -> Operations:
    """Return the hook of a run."""
    job = started.job
    return Operations(
        Console(started.say, time.monotonic),
        Trends(allowed_logprob_diff(job.config), split_of(job), lambda: started.record.evaluations),
        ProcessMemory(lambda: list(resident(os.getpid())), read_nodes=lambda: started.on_nodes(resident_of_workers)),
        make_utilization(job),
        job.config.train_dataset.batch_size,
        bool(job.config.workflows),
        find_captured(job)[0],
        job.config.weight_update.requests == "drain",
    )
