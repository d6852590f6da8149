"""The sections of this capability in a run's configuration."""

from areal_like.capabilities.agents.schema import BranchConfig, BranchKeys, EpisodeConfig, WorkflowKeys
from areal_like.config.keys import with_keys
from areal_like.config.schema import RunConfig


def episode_of(config: RunConfig) -> EpisodeConfig:
    """Return the section `episode`."""
    return with_keys(config, WorkflowKeys).episode


def branch_of(config: RunConfig) -> BranchConfig | None:
    """Return the section `rollout.branch`."""
    return with_keys(config.rollout, BranchKeys).branch
