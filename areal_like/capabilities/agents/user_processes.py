"""The processes in which a run's workflows are played."""

import pickle
from collections.abc import Callable
from pathlib import Path

from areal_like.capabilities.agents.playing import ENTRY
from areal_like.capabilities.agents.settings import episode_of
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.capabilities.agents.workers.remote import WorkerLimits
from areal_like.config.schema import RunConfig
from areal_like.runtime.user_code import Portable


def user_processes(config: RunConfig, say: Callable[[str], object], log: Path | None = None) -> UserProcesses:
    """Return the processes that run the user's workflows; their output goes to `log`."""
    episode = episode_of(config)
    functions = [Portable.pack(reference) for reference in config.workflows.values()]
    blocked_s = min(episode.blocked_s, episode.timeout_s)  # a blocked loop does not consume the time of its episodes
    limits = WorkerLimits(episode.workers, episode.loops, blocked_s, episode.memory_mb)
    return UserProcesses(ENTRY, pickle.dumps(functions), limits, say, log)
