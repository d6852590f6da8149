"""The gain of asynchronous training, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from allocation import efficiency as eff
from allocation.planner.choice import Choice
from allocation.planner.task import Task


@dataclass(frozen=True)
class Asynchrony:
    """Synchronous and asynchronous training in closed form.

    `a` and `b` are GPU-seconds of rollout and training. On N GPUs, n = N·a / (a + b) GPUs for servers balance both
    sides at (a + b) / N seconds. Synchronous training on shared GPUs takes the same time plus the wait for the longest
    response: asynchrony can hide at most this tail.
    """

    a: float
    b: float
    gpus: int
    tail: float
    staleness: float

    @property
    def even(self) -> float:
        """Seconds of a step with the ideal split."""
        return (self.a + self.b) / self.gpus

    @property
    def server_gpus(self) -> float:
        return self.gpus * self.a / (self.a + self.b)


def asynchrony(task: Task, best: Choice) -> Asynchrony:
    """Return the closed form for the best layout: seconds of both sides on all GPUs, and the expected staleness.

    A response takes `longest · mean / limit` seconds, so its oldest token is that many steps old when it completes; if
    rollout is faster than training, finished groups wait until admission stops them, at η.
    """
    servers, n = best.servers.dp * best.servers.tp, task.cluster.n_gpus
    trainer = best.trainer.sizes.dp * best.trainer.sizes.per_replica
    a, b = best.servers.seconds * servers, best.trainer.seconds * trainer
    tail = max(0.0, best.servers.longest - a / n)
    latency = best.servers.longest * eff.MEAN_OF_LONGEST / best.seconds
    waiting = max(0.0, 1 - best.servers.seconds / best.seconds) * task.staleness
    return Asynchrony(a, b, n, tail, min(float(task.staleness), latency + waiting))
