"""Verifiers, and the pool of processes that runs them under a time limit.

`REWARDS` maps `reward.type` to its verifier.
"""

from areal_like.rewards import gsm8k
from areal_like.rewards.pool import RewardPool, Verifier

REWARDS = {
    "gsm8k": Verifier(check=gsm8k.check, quick=gsm8k.quick, verify=gsm8k.verify, preload="areal_like.rewards.symbolic")
}

__all__ = ["REWARDS", "RewardPool", "Verifier"]
