"""What a response is worth: shipped verifiers, users' functions, and the processes that run them under a time limit."""

from areal_like.rewards.pool import Cause, Failure, RewardPool
from areal_like.rewards.scoring import Rewards
from areal_like.rewards.verifiers import REWARDS, Verifier

__all__ = ["REWARDS", "Cause", "Failure", "RewardPool", "Rewards", "Verifier"]
