"""Layouts of trainer and servers for a model on a cluster, best first, by predicted step time under the memory model.

An asynchronous step takes as long as its slower side, `max(training, rollout)`, plus the weight update; the
step time of synchronous training is the sum. Arithmetic, memory traffic and links are scaled by the shares in
`efficiency.py`, which marks the measured ones. The planner proposes only layouts that the compiler accepts and
that fit in memory.
"""

from allocation.planner.asynchrony import Asynchrony, asynchrony
from allocation.planner.choice import Choice, PredictedServers, PredictedTrainer, Sharing
from allocation.planner.search import best_each, best_on, best_servers, fewest_nodes, plan_layouts
from allocation.planner.seconds import offloaded_bytes, training_seconds
from allocation.planner.shortfall import shortfall
from allocation.planner.task import Task

__all__ = [
    "Asynchrony",
    "Choice",
    "PredictedServers",
    "PredictedTrainer",
    "Sharing",
    "Task",
    "asynchrony",
    "best_each",
    "best_on",
    "best_servers",
    "fewest_nodes",
    "offloaded_bytes",
    "plan_layouts",
    "shortfall",
    "training_seconds",
]
