"""Train from Python with a custom reward: python examples/python/own_reward.py [key=value ...]

The function is pickled by value for the reward processes, so it may be defined in a script or in a notebook cell.
"""

import sys
from pathlib import Path

from areal_like import train

CONFIG = Path(__file__).parents[1] / "math/gsm8k_grpo_cpu.yaml"


def score(response: str, row: dict) -> dict[str, float]:
    """1 for the right number; its parts are recorded beside it."""
    number = response.rpartition("####")[2].strip()
    right = float(number == row["answer"].rpartition("####")[2].strip())
    return {"reward": right, "is_a_number": float(number.isdigit())}


print("everything is in", train(CONFIG, sys.argv[1:], reward=score))
