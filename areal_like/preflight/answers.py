"""The check of reference answers that a run's rewards need."""

from areal_like.config.schema import RewardConfig
from areal_like.rewards.verifiers import REWARDS
from areal_like.types import AnswerCheck


def answer_check(config: RewardConfig) -> AnswerCheck | None:
    """Return the check of reference answers, or None if only the user's own code judges."""
    types = [judge.type for judge in config.judges.values() if judge.function is None and judge.type in REWARDS]
    return REWARDS[types[0]].check if types else None
